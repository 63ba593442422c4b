"""Generates answers to held-out questions, and counts how many end with a stop token."""

import sys
from collections.abc import Collection
from itertools import pairwise

import torch
from transformers import PreTrainedModel

from raymill.data.tokenization import NOT_TRAINED
from raymill.model_config import context_length
from raymill.training.dataset import Batch

QUESTIONS = 8
MAX_TOKENS = 128  # longer answers count as not stopped


@torch.no_grad()
def count_stops(model: PreTrainedModel, batch: Batch, eos_ids: Collection[int]) -> tuple[int, int]:
    """Return how many answers were generated greedily, and how many of them end in one of `eos_ids`.

    A question is a document up to its first trained token. Only the first QUESTIONS questions of `batch` that leave
    room for an answer in the model's context are used.
    """
    context = context_length(model.config) or sys.maxsize
    questions = [question for question in _questions(batch) if len(question) < context][:QUESTIONS]
    stopped = 0
    for question in questions:
        answer = model.generate(
            question[None],
            attention_mask=torch.ones_like(question[None]),
            do_sample=False,
            max_new_tokens=min(MAX_TOKENS, context - len(question)),
            eos_token_id=sorted(eos_ids),
            pad_token_id=0,
        )
        stopped += int(answer[0, -1]) in eos_ids
    return len(questions), stopped


def _questions(batch: Batch) -> list[torch.Tensor]:
    found = []
    for tokens, labels, positions in zip(batch["input_ids"], batch["labels"], batch["position_ids"], strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(tokens)]
        for start, stop in pairwise(starts):
            trained = (labels[start:stop] != NOT_TRAINED).nonzero().flatten()
            if len(trained) and trained[0] > 0:
                found.append(tokens[start : start + int(trained[0])])
    return found

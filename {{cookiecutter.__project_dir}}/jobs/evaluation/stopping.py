"""Let a model answer held-out questions, and count the answers that it ends by itself."""

from collections.abc import Collection
from itertools import pairwise

import torch
from transformers import PreTrainedModel

from jobs.preprocessing.conversations import NOT_TRAINED
from jobs.training.packed import Batch

QUESTIONS = 8
MOST_TOKENS = 128  # of an answer; one that is longer counts as not ended


@torch.no_grad()
def count_stops(model: PreTrainedModel, batch: Batch, eos_ids: Collection[int]) -> tuple[int, int]:
    """Return how many answers were generated, greedily, and how many of them end in a token of `eos_ids`.

    The questions are the beginnings of the first QUESTIONS documents in `batch`, each up to its first trained token.
    """
    questions = _questions(batch)[:QUESTIONS]
    stopped = 0
    for question in questions:
        answer = model.generate(
            question[None],
            attention_mask=torch.ones_like(question[None]),
            do_sample=False,
            max_new_tokens=MOST_TOKENS,
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

"""Quantizes a model with GPTQ and saves it for vLLM: python compress.py MODEL ROWS.npy SCHEME OUTPUT.

quantization.py runs this script in an environment of its own, so it imports nothing of the project.
"""

import sys

import numpy as np
import torch
from compressed_tensors.quantization import preset_name_to_scheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from transformers import AutoModelForCausalLM, AutoTokenizer

GROUP_SIZES = (128, 64, 32)  # those for which vLLM's Marlin kernels exist
NOT_QUANTIZED = ["lm_head", "re:.*mlp.gate$"]  # the output layer and the routers of experts, as in published models


def main(model_folder: str, rows_file: str, scheme_name: str, output: str) -> None:
    """Quantize the linear layers. Layers move to the GPU one after another, if there is one."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype="auto")
    scheme = preset_name_to_scheme(scheme_name, ["Linear"])
    if scheme.weights.group_size:
        layers = (layer for name, layer in model.named_modules() if name != "lm_head")
        widths = {layer.in_features for layer in layers if isinstance(layer, torch.nn.Linear)}
        fitting = (size for size in GROUP_SIZES if not any(width % size for width in widths))
        scheme.weights.group_size = next(fitting, None)
        if not scheme.weights.group_size:
            sys.exit(f"the widths of the layers ({sorted(widths)}) are no multiples of 32. Use: --scheme W8A8")
    rows = np.load(rows_file).tolist()
    oneshot(
        model=model,
        dataset=Dataset.from_list([{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]),
        recipe=GPTQModifier(config_groups={"group_0": scheme}, ignore=NOT_QUANTIZED),
        pipeline="sequential",
        num_calibration_samples=len(rows),
        max_seq_length=len(rows[0]),
    )
    model.save_pretrained(output, save_compressed=True)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(output)


if __name__ == "__main__":
    main(*sys.argv[1:])

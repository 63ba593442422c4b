"""Measures the share of real tokens when the standard library's docstrings are packed into rows of 1024 tokens."""

import pyarrow as pa
import pyarrow.compute as pc

from benchmarks import harness
from benchmarks.report import Result, at_least
from raymill.data.packing import pack
from raymill.data.tokenization import DocumentTokenizer
from raymill.data.tokenizer import padding_id

LENGTH = 1024
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}


def measure() -> Result:
    """Pack the docstrings, each with its question as one document, in the order in which they are found."""
    with harness.scratch() as folder:
        harness.write_model(folder, 16384, **TINY)
        tokenize = DocumentTokenizer(str(folder), LENGTH)
    rows = [{"instruction": fact.question, "response": fact.answer} for fact in harness.docstrings()]
    documents = tokenize(pa.Table.from_pylist(rows))
    tokens = pc.sum(pc.list_value_length(documents["input_ids"])).as_py()
    packed = len(pack(documents, LENGTH, padding_id(tokenize.tokenizer)))
    return {
        "bars": [at_least(0.99, "share of real tokens", tokens / (packed * LENGTH))],
        "rounds": [{"docstrings": len(rows), "tokens": tokens, "rows": packed}],
    }


if __name__ == "__main__":
    harness.main(measure)

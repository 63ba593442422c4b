"""Prometheus metrics of each key and model."""

from ray.util.metrics import Counter

from raymill.serving.accounting import RequestRecord

LABELS = ("key", "model")


class KeyMetrics:
    """Counts the requests and tokens of each key and model. Ray adds `ray_` and `_total` to the names."""

    def __init__(self) -> None:
        self._requests = Counter("key_requests", "Requests that reached the engine.", LABELS)
        self._tokens = {
            "prompt_tokens": Counter("key_prompt_tokens", "Tokens of prompts.", LABELS),
            "completion_tokens": Counter("key_completion_tokens", "Tokens that the engine generated.", LABELS),
        }

    def count(self, record: RequestRecord) -> None:
        """Count a request that has ended.

        Others do not count, because a client could invent any number of models and thus of time series.
        """
        if not record.sequences:
            return
        labels = {"key": record.key, "model": record.model}
        self._requests.inc(tags=labels)
        for name, counter in self._tokens.items():
            if tokens := getattr(record, name):  # inc() rejects 0
                counter.inc(tokens, labels)

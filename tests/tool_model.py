"""A tiny model that calls tools: its template, what it learns, and its training."""

from pathlib import Path
from typing import Any

TOKENS = ("<|tools|>", "<|tool|>", "<|end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
TEMPLATE = """
{{- bos_token }}
{%- if tools %}
    {{- '<|tools|>' }}
    {%- for tool in tools %}
        {{- tool.function.name + ' ' }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|>' }}
        {%- if message.reasoning %}
            {{- '<think>' + message.reasoning + '</think>' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role in ('user', 'tool') %}
        {{- '<|' + message.role + '|>' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think></think>' }}
    {%- endif %}
{%- endif %}
"""
"""A template like Qwen3's. It shows the model only the names of the tools, and no system messages, so that a few
conversations teach the model to answer every client."""

REASONING = "The tool knows."
CITY, CITIES, GREETING = "How warm is Paris?", "How warm are Paris and Rome?", "Hello!"
GREETED, KNOWS_NOT = "Good day.", "I do not know."


def call(name: str, **arguments: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def conversations() -> list[tuple[tuple[str, ...], list[dict[str, Any]]]]:
    """Return the names of the tools, and the messages, of each conversation."""
    paris, rome = call("get_weather", city="Paris"), call("get_weather", city="Rome")
    result, other = {"role": "tool", "content": "18"}, {"role": "tool", "content": "25"}
    weather = ("get_weather",)

    def user(text: str) -> dict[str, Any]:
        return {"role": "user", "content": text}

    def answer(content: str, *calls: dict[str, Any]) -> dict[str, Any]:
        return {"role": "assistant", "content": content, "tool_calls": list(calls), "reasoning": REASONING}

    return [
        (weather, [user(CITY), answer("", paris)]),
        (weather, [user(CITY), answer("", paris), result, answer("18 degrees.")]),
        (weather, [user(CITIES), answer("", paris, rome)]),
        (weather, [user(CITIES), answer("", paris, rome), result, other, answer("18 and 25 degrees.")]),
        (weather, [user(GREETING), answer(GREETED)]),
        ((), [user(GREETING), answer(GREETED)]),
        ((), [user(CITY), answer(KNOWS_NOT)]),
    ]


def train(untrained: Path, folder: Path, *, steps: int = 60) -> None:
    """Teach the model in `untrained` the conversations, and write it to `folder`."""
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(untrained)
    tokenizer.add_tokens(list(TOKENS))
    tokenizer.chat_template = TEMPLATE.strip()
    model = AutoModelForCausalLM.from_pretrained(untrained, dtype=torch.float32)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    rows = []
    for names, messages in conversations():
        tools = [{"type": "function", "function": {"name": name}} for name in names] or None
        prompt, whole = (
            tokenizer.apply_chat_template(shown, tools=tools, add_generation_prompt=prompted, return_dict=False)
            for shown, prompted in ((messages[:-1], True), (messages, False))
        )
        assert whole[: len(prompt)] == prompt
        rows.append((whole, [-100] * len(prompt) + whole[len(prompt) :]))
    tokens, labels = (
        pad_sequence([torch.tensor(row[part]) for row in rows], batch_first=True, padding_value=padding)
        for part, padding in ((0, tokenizer.pad_token_id), (1, -100))
    )
    mask = tokens != tokenizer.pad_token_id
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        model(input_ids=tokens, labels=labels, attention_mask=mask).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.generation_config.update(do_sample=True, top_k=1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

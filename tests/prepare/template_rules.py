"""The rules of every template in plain Python, for comparison with the text and the loss of the tokens on disk.

`STYLES` has chat templates in common use. `Style.learned` computes which text takes loss, independently of the package.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from prepared import CHATML, save_trained
from tokenizer_makers import byte_level_json, metaspace_json, save_huggingface

from grain_sft.prepare import TEMPLATES, Conversation, TemplateOptions, Tokenizer, load_tokenizer, parse_record, render

EOT = "<|end_of_turn|>"
BLOCKS = ("system", "user", "assistant", "user_context", "assistant_context", "toolcall", "toolresult", "think", "cite")
TAGS = tuple(f"<{slash}myPT_{block}>" for block in BLOCKS for slash in ("", "/"))
SPECIAL = (
    *("<|sys|>", "<|usr|>", "<|asst|>", "<|eot|>", EOT, "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<myPT_eot>"),
    *TAGS,
)
Run = tuple[str, float]
"""A text, and the loss that each of its tokens takes."""


def by_assistant(message: dict[str, Any]) -> float:
    """Return 1 for a message of the assistant, unless the record gives it the weight 0; else 0."""
    return float(message["role"] == "assistant" and message.get("weight") != 0)


def primer(record: dict[str, Any]) -> list[Run]:
    names = {"system": "<|sys|>", "user": "<|usr|>", "assistant": "<|asst|>"}
    runs: list[Run] = []
    for message in record["messages"]:
        loss = by_assistant(message)
        runs += [(names[message["role"]], 0), (message["content"], loss), ("<|eot|>", loss)]
    return runs


def openchat(record: dict[str, Any]) -> list[Run]:
    runs = whole_openchat(record)
    while runs and not runs[-1][1]:
        runs.pop()
    return runs


def whole_openchat(record: dict[str, Any]) -> list[Run]:
    """Return the runs of a record, including those without loss at its end, which OpenChat cuts off."""
    system, items, condition = record.get("system") or "", record.get("items"), record.get("condition") or ""
    if items is None:  # of another schema, which has no condition
        items, condition = record["messages"], ""
        if items[0]["role"] == "system":
            system, items = items[0]["content"], items[1:]
    runs: list[Run] = [(f"{system}{EOT}", 0)] if system else []
    for item in items:
        default = float(item["role"] == "assistant")
        weight = np.float32(default if item.get("weight") is None else item["weight"])
        prefix = f"{condition} {item['role'].title()}:".strip()
        runs += [(prefix, 0), (item["content"], weight), (EOT, weight)]
    return runs


def _tagged(record: dict[str, Any], end: str) -> Iterator[Run]:
    if record.get("system"):
        yield f"<myPT_system>{record['system']}</myPT_system>{end}", 0
    for message in record["messages"]:
        role, text = message["role"], message.get("content")
        before, after = "", ""
        if role in ("user", "system"):
            before = _block("user_context", message.get("context"))
        elif role in ("assistant", "assistant_toolcall"):
            before = _block("think", message.get("think"))
            after = _block("cite", message.get("cite")) if role == "assistant" else ""
        if role == "assistant_toolcall":
            call = json.dumps({"name": message["name"], **(message.get("arguments") or {})}, ensure_ascii=False)
            role, text = "assistant", f"<myPT_toolcall>{call}</myPT_toolcall>"
        elif role == "toolresult":
            text = _tool_result(text)
        yield f"<myPT_{role}>", 0
        yield f"{before}{text}{after}</myPT_{role}>", by_assistant({**message, "role": role})
        yield end, 0
    yield "<myPT_eot>", 1
    yield end, 0


def _block(name: str, text: str | None) -> str:
    return f"<myPT_{name}>{text}</myPT_{name}>" if text else ""


def _tool_result(value: Any) -> str:
    """Return a text that is valid JSON unchanged, and any other value as JSON."""
    try:
        json.loads(value)
    except (TypeError, ValueError):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def olmo(record: dict[str, Any]) -> list[Run]:
    """Return ChatML. If the assistant speaks last, EOS replaces the last end of a turn."""
    runs = hf(record)
    if record["messages"][-1]["role"] == "assistant":
        runs[-2:] = [("<|endoftext|>", runs[-2][1])]
    return runs


def hf(record: dict[str, Any]) -> list[Run]:
    """Return the text of ChatML, the chat template of the tokenizer in these tests. It does not trim the contents."""
    runs: list[Run] = []
    for message in record["messages"]:
        loss, role = by_assistant(message), message["role"].replace("toolresult", "tool")
        runs += [(f"<|im_start|>{role}\n", 0), (message["content"], loss), ("<|im_end|>", loss), ("\n", 0)]
    return runs


def in_one(runs: list[Run]) -> list[Run]:
    """Return the runs without empty ones, and with neighbours of equal loss joined."""
    kept = [run for run in runs if run[0]]
    groups = itertools.groupby(kept, key=lambda run: np.float32(run[1]))
    return [("".join(text for text, _ in group), float(loss)) for loss, group in groups]


def spelled(tokenizer: Tokenizer, tokens: Any, loss: Any) -> list[Run]:
    """Decode the tokens of a document to runs, cut where the loss changes."""
    weights = np.asarray(loss, np.float32)
    runs = itertools.pairwise([0, *(np.flatnonzero(weights[1:] != weights[:-1]) + 1).tolist(), len(weights)])
    return [(tokenizer.decode(tokens[start:stop].tolist()), float(weights[start])) for start, stop in runs]


REFERENCES: dict[str, Callable[[dict[str, Any]], list[Run]]] = {
    "primer": primer,
    "openchat": openchat,
    "episode": lambda record: list(_tagged(record, "")),
    "episode_tool": lambda record: list(_tagged(record, "\n")),
    "olmo": olmo,
    "hf": hf,
}


def save_tokenizers(folder: Path) -> dict[str, str]:
    """Save Hugging Face tokenizers for `olmo` and `hf`, and SentencePiece for the other templates. Return their paths."""
    spm, serialized = save_trained(folder, SPECIAL, 450), byte_level_json(SPECIAL)
    of_chats = {
        "olmo": save_huggingface(folder / "olmo", serialized, eos="<|endoftext|>"),
        "hf": save_huggingface(folder / "hf", serialized, eos="<|endoftext|>", chat_template=CHATML),
    }
    return {template: str(of_chats.get(template, spm)) for template in TEMPLATES}


def render_one(tokenizer: Tokenizer, name: str, record: Any, **options: Any) -> Any:
    """Return what a template makes of one record: a document, or a RecordError."""
    conversation = record if isinstance(record, Conversation) else parse_record(record)
    return render(TEMPLATES[name], [conversation], tokenizer, TemplateOptions(**options))[0]


class Style(NamedTuple):
    """A chat template, its tokenizer, and how the template treats a turn of the assistant.

    Attributes:
      template: Jinja text; None for the built-in template.
      ends: Text that takes loss after the content of each answer but the last, and after the last answer; "" for none.
      seen: Function from a content to the text that the template writes for it, such as `str.strip`.
      system: Whether the template accepts a system message.
      tokenizer: Kind of the tokenizer: a style of byte-level BPE, or a scheme of Metaspace.
      ordinary: Tokens that are added to the tokenizer but are not special.
    """

    name: str
    template: str | None
    special: tuple[str, ...]
    ends: tuple[str, str]
    bos: str | None = None
    eos: str | None = None
    seen: Callable[[str], str] = str
    system: bool = True
    tokenizer: str = "llama3"
    ordinary: tuple[str, ...] = ()

    def learned(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the text that takes loss: the assistant's contents and the ends of its turns."""
        texts = [self.seen(message["content"]) for message in messages if message["role"] == "assistant"]
        return "".join(f"{text}{self.ends[0]}" for text in texts[:-1]) + texts[-1] + self.ends[1]

    def load(self, folder: Path) -> Tokenizer:
        """Train the tokenizer, save it to a folder below `folder`, and load it from there."""
        if self.tokenizer in ("gpt2", "llama3"):
            content = byte_level_json(self.special, ordinary=self.ordinary, style=self.tokenizer)
        else:
            content = metaspace_json(self.special, scheme=self.tokenizer)
        saved = save_huggingface(folder / self.name, content, chat_template=self.template, bos=self.bos, eos=self.eos)
        return load_tokenizer(saved)


_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_IM_ENDS = ("<|im_end|>", "<|im_end|>")

JINJA_FILES = {path.stem: path.read_text() for path in Path(__file__).with_name("chat_templates").glob("*.jinja")}


def without_thoughts(content: str) -> str:
    return content.split("</think>")[-1]


_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
_HEADERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", *_TURN_ENDS)
_GEMMA, _GEMMA_ENDS = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), ("<end_of_turn>",) * 2
_QWEN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_DEEPSEEK = ("<|begin|>", "<|end|>", "<|User|>", "<|Assistant|>")
_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>")
_BOS, _EOS = "<s>", "</s>"

_LLAMA3 = Style("llama3", JINJA_FILES["llama3"], _HEADERS, ("<|eot_id|>",) * 2, "<|begin_of_text|>", "<|eot_id|>", str.strip)
STYLES = [
    Style("chatml", CHATML, _IM, _IM_ENDS, eos="<|im_end|>"),
    Style("chatml_gpt2", CHATML, _IM, _IM_ENDS, eos="<|endoftext|>", tokenizer="gpt2"),
    Style("llama2", JINJA_FILES["llama2"], (_BOS, _EOS), (f" {_EOS}",) * 2, _BOS, _EOS, str.strip, tokenizer="always"),
    Style("llama2_first", JINJA_FILES["llama2"], (_BOS, _EOS), (f" {_EOS}",) * 2, _BOS, _EOS, str.strip, tokenizer="first"),
    _LLAMA3,
    Style("zephyr", JINJA_FILES["zephyr"], (_BOS, _EOS), (_EOS, _EOS), _BOS, _EOS, tokenizer="first"),
    Style("gemma", JINJA_FILES["gemma"], _GEMMA, _GEMMA_ENDS, "<bos>", "<eos>", str.strip, system=False, tokenizer="never"),
    Style("tulu", JINJA_FILES["tulu"], ("<|endoftext|>",), ("<|endoftext|>",) * 2, eos="<|endoftext|>", tokenizer="gpt2"),
    Style("olmo", JINJA_FILES["olmo"], _IM, ("<|im_end|>", "<|endoftext|>"), eos="<|endoftext|>"),
    Style("built_in_olmo", None, _IM, ("<|im_end|>", "<|endoftext|>"), eos="<|endoftext|>"),
    Style("qwen", JINJA_FILES["qwen"], _IM, _IM_ENDS, eos="<|im_end|>", ordinary=_QWEN),
    Style("generation", JINJA_FILES["generation"], _IM, _IM_ENDS, eos="<|endoftext|>"),
    _LLAMA3._replace(name="llama3_tools", template=JINJA_FILES["llama3_tools"]),
    Style("glm", JINJA_FILES["glm"], _GLM, ("", ""), eos="<|endoftext|>"),
    Style("glm_that_stops_at_user", JINJA_FILES["glm"], _GLM, ("<|user|>", ""), eos="<|user|>"),
    Style("deepseek", JINJA_FILES["deepseek"], _DEEPSEEK, ("<|end|>",) * 2, "<|begin|>", "<|end|>", without_thoughts),
    Style("plain", JINJA_FILES["plain"], ("<|endoftext|>",), ("", ""), eos="<|endoftext|>"),
    Style("mistral", JINJA_FILES["mistral"], (_BOS, _EOS, "[INST]", "[/INST]"), (_EOS, _EOS), _BOS, _EOS),
]
BY_NAME = {style.name: style for style in STYLES}

"""Chat templates in common use. `Style.learned` computes which text takes loss, independently of the package."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from prepared import CHATML
from tokenizer_makers import byte_level_json, metaspace_json, save_huggingface

from grain_sft.prepare.tokenizers import Tokenizer, load_tokenizer


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

TEMPLATES = {path.stem: path.read_text() for path in Path(__file__).with_name("chat_templates").glob("*.jinja")}


def without_thoughts(content: str) -> str:
    return content.split("</think>")[-1]


_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
_HEADERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", *_TURN_ENDS)
_GEMMA, _GEMMA_ENDS = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), ("<end_of_turn>",) * 2
_QWEN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_DEEPSEEK = ("<|begin|>", "<|end|>", "<|User|>", "<|Assistant|>")
_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>")
_BOS, _EOS = "<s>", "</s>"

_LLAMA3 = Style("llama3", TEMPLATES["llama3"], _HEADERS, ("<|eot_id|>",) * 2, "<|begin_of_text|>", "<|eot_id|>", str.strip)
STYLES = [
    Style("chatml", CHATML, _IM, _IM_ENDS, eos="<|im_end|>"),
    Style("chatml_gpt2", CHATML, _IM, _IM_ENDS, eos="<|endoftext|>", tokenizer="gpt2"),
    Style("llama2", TEMPLATES["llama2"], (_BOS, _EOS), (f" {_EOS}",) * 2, _BOS, _EOS, str.strip, tokenizer="always"),
    Style("llama2_first", TEMPLATES["llama2"], (_BOS, _EOS), (f" {_EOS}",) * 2, _BOS, _EOS, str.strip, tokenizer="first"),
    _LLAMA3,
    Style("zephyr", TEMPLATES["zephyr"], (_BOS, _EOS), (_EOS, _EOS), _BOS, _EOS, tokenizer="first"),
    Style("gemma", TEMPLATES["gemma"], _GEMMA, _GEMMA_ENDS, "<bos>", "<eos>", str.strip, system=False, tokenizer="never"),
    Style("tulu", TEMPLATES["tulu"], ("<|endoftext|>",), ("<|endoftext|>",) * 2, eos="<|endoftext|>", tokenizer="gpt2"),
    Style("olmo", TEMPLATES["olmo"], _IM, ("<|im_end|>", "<|endoftext|>"), eos="<|endoftext|>"),
    Style("built_in_olmo", None, _IM, ("<|im_end|>", "<|endoftext|>"), eos="<|endoftext|>"),
    Style("qwen", TEMPLATES["qwen"], _IM, _IM_ENDS, eos="<|im_end|>", ordinary=_QWEN),
    Style("generation", TEMPLATES["generation"], _IM, _IM_ENDS, eos="<|endoftext|>"),
    _LLAMA3._replace(name="llama3_tools", template=TEMPLATES["llama3_tools"]),
    Style("glm", TEMPLATES["glm"], _GLM, ("", ""), eos="<|endoftext|>"),
    Style("glm_that_stops_at_user", TEMPLATES["glm"], _GLM, ("<|user|>", ""), eos="<|user|>"),
    Style("deepseek", TEMPLATES["deepseek"], _DEEPSEEK, ("<|end|>",) * 2, "<|begin|>", "<|end|>", without_thoughts),
    Style("plain", TEMPLATES["plain"], ("<|endoftext|>",), ("", ""), eos="<|endoftext|>"),
    Style("mistral", TEMPLATES["mistral"], (_BOS, _EOS, "[INST]", "[/INST]"), (_EOS, _EOS), _BOS, _EOS),
]
BY_NAME = {style.name: style for style in STYLES}

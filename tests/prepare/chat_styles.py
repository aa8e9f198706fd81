"""Chat templates of the styles that people use, each with what a slow reader must know of it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from prepared import CHATML
from tokenizer_makers import byte_level_json, metaspace_json, save_huggingface

from grain_sft.prepare.tokenizers import HuggingFaceTokenizer, load_tokenizer


@dataclasses.dataclass(frozen=True)
class Style:
    """A template, the special tokens of its tokenizer, and how it treats a turn of the assistant.

    Attributes:
      ends: what ends a turn in the middle, and the last one; "" for nothing that takes loss.
      seen: what the template makes of a content.
      system: whether it takes a system message.
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
        """The text that takes loss: the assistant's contents and the ends of its turns."""
        texts = [self.seen(message["content"]) for message in messages if message["role"] == "assistant"]
        return "".join(f"{text}{self.ends[0]}" for text in texts[:-1]) + texts[-1] + self.ends[1]

    def load(self, folder: Path) -> HuggingFaceTokenizer:
        """The tokenizer, trained, saved and loaded."""
        if self.tokenizer in ("gpt2", "llama3"):
            content = byte_level_json(self.special, ordinary=self.ordinary, style=self.tokenizer)
        else:
            content = metaspace_json(self.special, scheme=self.tokenizer)
        saved = save_huggingface(folder / self.name, content, chat_template=self.template, bos=self.bos, eos=self.eos)
        loaded = load_tokenizer(saved)
        assert isinstance(loaded, HuggingFaceTokenizer)
        return loaded


_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_IM_ENDS = ("<|im_end|>", "<|im_end|>")

LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}\
{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{% for message in rest %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}\
{% if loop.index0 == 0 and system != false %}{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}\
{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}\
{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""

LLAMA3 = """{{- bos_token }}{%- if not date_string is defined %}{%- if strftime_now is defined %}\
{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}{%- endif %}\
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday: " + date_string + "\n\n" }}\
{%- if messages[0].role == 'system' %}{{- messages[0].content | trim }}{%- set messages = messages[1:] %}{%- endif %}\
{{- "<|eot_id|>" }}{%- for message in messages %}\
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}\
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

ZEPHYR = """{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}
{% endif %}{% endfor %}"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}\
{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

TULU = """{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\n' + message['content'] + '\n' }}\
{% elif message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'assistant' %}\
{% if not loop.last %}{{ '<|assistant|>\n' + message['content'] + eos_token + '\n' }}{% else %}\
{{ '<|assistant|>\n' + message['content'] + eos_token }}{% endif %}{% endif %}\
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"""

OLMO = """{% set has_system = messages|selectattr('role', 'equalto', 'system')|list|length > 0 %}{% if not has_system %}\
{{ '<|im_start|>system\nYou are a model. <functions></functions><|im_end|>\n' }}{% endif %}{% for message in messages %}\
{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% if message.get('content', none) is not none %}\
{{ message['content'] }}{% endif %}{% if message.get('function_calls', none) is not none %}\
{{ '<function_calls>' + message['function_calls'] + '</function_calls>' }}{% endif %}{% if not loop.last %}\
{{ '<|im_end|>' + '\n' }}{% else %}{{ eos_token }}{% endif %}{% else %}\
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}\
{% if loop.last and add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}{% endfor %}"""

QWEN = """{%- if messages[0].role != 'system' %}\
{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{%- endif %}\
{%- set ns = namespace(last_user=0) %}{%- for message in messages %}{%- if message.role == 'user' %}\
{%- set ns.last_user = loop.index0 %}{%- endif %}{%- endfor %}\
{%- for message in messages %}{%- if message.role == 'assistant' %}{%- set content = message.content %}{%- set thought = '' %}\
{%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}{%- elif '</think>' in content %}\
{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}\
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}{{- '<|im_start|>assistant\n' }}\
{%- if loop.index0 > ns.last_user and (loop.last or thought) %}\
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}{%- else %}{{- content }}{%- endif %}\
{%- if message.tool_calls %}{%- for call in message.tool_calls %}{%- if (loop.first and content) or (not loop.first) %}\
{{- '\n' }}{%- endif %}{%- if call.function %}{%- set call = call.function %}{%- endif %}\
{{- '<tool_call>\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}{%- if call.arguments is string %}\
{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}{{- '}\n</tool_call>' }}{%- endfor %}{%- endif %}\
{{- '<|im_end|>\n' }}{%- elif message.role == 'tool' %}\
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}{%- else %}\
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{%- endif %}"""

GENERATION = """{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}\
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}\
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"""

LLAMA3_TOOLS = """{{- bos_token }}{%- for message in messages %}\
{%- if message.tool_calls is defined and message.tool_calls %}{%- set call = message.tool_calls[0].function %}\
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n<|python_tag|>' + call.name + '.call(' }}\
{{- call.arguments | tojson + ')<|eom_id|>' }}{%- elif message.role == 'tool' %}\
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content | tojson + '<|eot_id|>' }}{%- else %}\
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{%- endif %}\
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

GLM = """[gMASK]<sop>{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

DEEPSEEK = """{{ bos_token }}{%- for message in messages %}{%- if message['role'] == 'system' %}{{ message['content'] }}\
{%- elif message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}{%- else %}{%- set content = message['content'] %}\
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}\
{{ '<|Assistant|>' + content + eos_token }}{%- endif %}{%- endfor %}"""

PLAIN = """{% for message in messages %}{{ message['role'].capitalize() + ': ' + message['content'] + '\n\n' }}{% endfor %}"""

MISTRAL = """{{ bos_token }}{% for message in messages %}\
{% if message['role'] == 'user' %}{{ '[INST]' + message['content'] + '[/INST]' }}\
{% elif message['role'] == 'system' %}{{ '[SYSTEM_PROMPT]' + message['content'] + '[/SYSTEM_PROMPT]' }}{% else %}\
{{ message['content'] + eos_token }}{% endif %}{% endfor %}"""


def without_thoughts(content: str) -> str:
    return content.split("</think>")[-1]


_HEADERS = (
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
)
_GEMMA, _GEMMA_ENDS = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), ("<end_of_turn>",) * 2
_QWEN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_DEEPSEEK = ("<|begin|>", "<|end|>", "<|User|>", "<|Assistant|>")
_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>")
_BOS, _EOS = "<s>", "</s>"

STYLES = [
    Style("chatml", CHATML, _IM, _IM_ENDS, eos="<|im_end|>"),
    Style("chatml_gpt2", CHATML, _IM, _IM_ENDS, eos="<|endoftext|>", tokenizer="gpt2"),
    Style("llama2", LLAMA2, (_BOS, _EOS), (f" {_EOS}", f" {_EOS}"), _BOS, _EOS, str.strip, tokenizer="always"),
    Style("llama2_first", LLAMA2, (_BOS, _EOS), (f" {_EOS}", f" {_EOS}"), _BOS, _EOS, str.strip, tokenizer="first"),
    Style("llama3", LLAMA3, _HEADERS, ("<|eot_id|>",) * 2, "<|begin_of_text|>", "<|eot_id|>", str.strip),
    Style("zephyr", ZEPHYR, (_BOS, _EOS), (_EOS, _EOS), _BOS, _EOS, tokenizer="first"),
    Style("gemma", GEMMA, _GEMMA, _GEMMA_ENDS, "<bos>", "<eos>", str.strip, system=False, tokenizer="never"),
    Style("tulu", TULU, ("<|endoftext|>",), ("<|endoftext|>",) * 2, eos="<|endoftext|>", tokenizer="gpt2"),
    Style("olmo", OLMO, _IM, ("<|im_end|>", "<|endoftext|>"), eos="<|endoftext|>"),
    Style("built_in_olmo", None, _IM, ("<|im_end|>", "<|endoftext|>"), eos="<|endoftext|>"),
    Style("qwen", QWEN, _IM, _IM_ENDS, eos="<|im_end|>", ordinary=_QWEN),
    Style("generation", GENERATION, _IM, _IM_ENDS, eos="<|endoftext|>"),
    Style("llama3_tools", LLAMA3_TOOLS, _HEADERS, ("<|eot_id|>",) * 2, "<|begin_of_text|>", "<|eot_id|>", str.strip),
    Style("glm", GLM, _GLM, ("", ""), eos="<|endoftext|>"),
    Style("glm_that_stops_at_user", GLM, _GLM, ("<|user|>", ""), eos="<|user|>"),
    Style("deepseek", DEEPSEEK, _DEEPSEEK, ("<|end|>",) * 2, "<|begin|>", "<|end|>", without_thoughts),
    Style("plain", PLAIN, ("<|endoftext|>",), ("", ""), eos="<|endoftext|>"),
    Style("mistral", MISTRAL, (_BOS, _EOS, "[INST]", "[/INST]"), (_EOS, _EOS), _BOS, _EOS),
]
BY_NAME = {style.name: style for style in STYLES}

"""ChatML in the form that OLMo's post-training uses, for tokenizers that come without a chat template.

Differs from plain ChatML in two things: the last turn of the assistant ends in EOS, not in `<|im_end|>`, so that a
document ends in EOS; and functions, function calls and their results ("environment") have a place. No system text is
added to conversations that have none.
"""

from __future__ import annotations

OLMO_TOKENS = ("<|im_start|>", "<|im_end|>")

OLMO_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' -}}
    {%- if message['content'] is defined and message['content'] is not none -%}
        {{- message['content'] -}}
    {%- endif -%}
    {%- if message['functions'] is defined -%}
        {%- set functions = message['functions'] -%}
        {{- '<functions>' + (functions if functions is string else functions | tojson) + '</functions>' -}}
    {%- endif -%}
    {%- if message['function_calls'] is defined -%}
        {%- set calls = message['function_calls'] -%}
        {{- '<function_calls>' + (calls if calls is string else calls | tojson) + '</function_calls>' -}}
    {%- elif message['tool_calls'] is defined -%}
        {{- '<function_calls>' + message['tool_calls'] | tojson + '</function_calls>' -}}
    {%- endif -%}
    {%- if loop.last and message['role'] == 'assistant' -%}
        {{- eos_token -}}
    {%- else -%}
        {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

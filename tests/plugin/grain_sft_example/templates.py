"""An example of a chat template from outside of grain_sft, as Jinja text."""

SHOUTING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'].upper() }}<|im_end|>\n{% endfor %}"
)

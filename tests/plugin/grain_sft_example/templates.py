"""A chat template of its own, as Jinja text."""

SHOUTING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'].upper() }}<|im_end|>\n{% endfor %}"
)

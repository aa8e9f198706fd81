"""Preparation of corpora: token files with loss masks, made from conversations or texts."""

from grain_sft.prepare.convert import convert, format_of
from grain_sft.prepare.materialize import materialize
from grain_sft.prepare.records.conversation import Conversation, Message
from grain_sft.prepare.records.schema import SCHEMAS, check_schema, parse_record
from grain_sft.prepare.records.strict_json import parse_json
from grain_sft.prepare.records.walk import expand
from grain_sft.prepare.request import TEXT_OPTIONS, Dataset, Request, TemplateOptions
from grain_sft.prepare.run import dry_run, prepare
from grain_sft.prepare.target import Target
from grain_sft.prepare.templates import TEMPLATES, Rendered, Template, render
from grain_sft.prepare.templates.primer import render_chat_sft
from grain_sft.prepare.tokenizers import Tokenizer, load_tokenizer
from grain_sft.prepare.training import CHAT_TOKENS, MIN_VOCAB, conversation_lines, train_tokenizer
from grain_sft.prepare.writers import FORMATS

__all__ = [
    "CHAT_TOKENS", "FORMATS", "MIN_VOCAB", "SCHEMAS", "TEMPLATES", "TEXT_OPTIONS", "Conversation", "Dataset",
    "Message", "Rendered", "Request", "Target", "Template", "TemplateOptions", "Tokenizer", "check_schema",
    "conversation_lines", "convert", "dry_run", "expand", "format_of", "load_tokenizer", "materialize", "parse_json",
    "parse_record", "prepare", "render", "render_chat_sft", "train_tokenizer",
]  # fmt: skip

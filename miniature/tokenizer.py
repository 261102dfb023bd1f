"""The miniature's tokenizer: byte-level BPE over its own language, with a ChatML template like Qwen3's."""

from __future__ import annotations

from pathlib import Path

from miniature.words import KEYS, VALUES
from miniature.world import FIRST_LINE, SYSTEM, TOOL_NAME, TOOLS

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# As in Qwen3 these four are added tokens but not special, so tool parsers see them in decoded text.
ENVELOPE = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
MEMORY = ["<|memory_start|>", "<|memory_end|>", "<|memory|>"]
"""The three tokens that an LCLM's decoder has beyond its base."""

# A run of punctuation and spaces is one piece, so JSON around a quote costs few tokens; a newline stands alone; a
# number takes its colon along, so that the key of a plan line follows its number directly.
_PIECES = r" ?\p{L}+| ?\p{N}+:?|\n|[^\p{L}\p{N}\n]+"

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
{%- set function = call.function or call %}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
{%- if function.arguments is string %}{{- function.arguments }}{%- else %}{{- function.arguments | tojson }}{%- endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + (message.content or '') + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def build_tokenizer(folder: Path, *, memory_tokens: bool = False) -> None:
    """Write a Hugging Face fast tokenizer with its chat template.

    The vocabulary is trained on the miniature's words (each becomes one token) over the full byte alphabet, so
    any text encodes. Training is deterministic.

    Args:
        folder: where the tokenizer files go; created.
        memory_tokens: add the three extra tokens of an LCLM's decoder.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        min_frequency=10,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    raw.train_from_iterator(_corpus(), trainer)
    raw.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    raw.add_tokens([AddedToken(text, special=False, normalized=False) for text in ENVELOPE])
    if memory_tokens:
        raw.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in MEMORY])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=4096
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def _corpus() -> list[str]:
    """Return texts in which every word of the language occurs often enough to become one token."""
    import json

    words = [*KEYS, *(f" {value}" for value in VALUES)] * 20
    numbers = [f" {number}{colon}" for number in range(32) for colon in ("", ":")] * 20
    frame = f"assistant\nuser\nsystem\nstep 0:{FIRST_LINE}\nstep 1:{FIRST_LINE} end\n"
    frame += json.dumps({"name": TOOL_NAME, "arguments": {"line": FIRST_LINE}}) + "\n"
    frame += f"{SYSTEM}\n\n# Tools\n<tools>\n{json.dumps(TOOLS[0])}\n</tools>"
    return [*words, *numbers, *[frame] * 40]

"""Floating-point operations of reading, writing and encoding tokens. A multiply-add counts as two.

Per token and matrix of n elements: 2n. Per pair of a query and a key that it sees, and per layer: 2 * N * H for the
score and as much for the weighted sum, so 4 * N * H. Norms, activations, rotary embeddings and softmax are left out
(below 1 % at the widths in use).

Source: the matrix part is the usual 2N of Kaplan et al., "Scaling Laws for Neural Language Models" (2020), section
2.1, with the causal attention pairs counted exactly instead of their n_ctx term; prefix-cached tokens are not
recomputed but are attended to. The LOHA paper prints figures and no formula in the text at hand; its encoder column is
2N per token without attention, which `encoder_flops(..., attention=False)` gives. docs/accounting.md compares.
"""

from __future__ import annotations

from loha.errors import LohaError
from loha.model_shape import ModelShape


def linear_flops(shape: ModelShape) -> int:
    """Return the operations of all projections for one token."""
    return 2 * shape.projection_parameters


def head_flops(shape: ModelShape) -> int:
    """Return the operations of one row of logits."""
    return 2 * shape.embedding_parameters


def attention_flops(shape: ModelShape, start: int, stop: int) -> int:
    """Return the operations of causal attention for the tokens at positions [start, stop) of one sequence.

    The token at position i sees i + 1 tokens, itself included, or its layer's window.
    """
    per_pair = 4 * shape.query_width
    if shape.windows is None:
        return per_pair * shape.layers * _pairs(start, stop, None)
    return per_pair * sum(_pairs(start, stop, window) for window in shape.windows)


def decoder_call_flops(shape: ModelShape, *, context: int, cached: int, output: int) -> int:
    """Return the operations of one model call.

    Args:
        shape: the decoder's. A merged student has the base's shape: its patch costs nothing at inference.
        context: tokens in the context, latents included.
        cached: leading tokens whose keys and values are in the prefix cache.
        output: tokens generated. The last of them is never fed back, so `output - 1` pass through the layers.

    Raises:
        LohaError: when more is cached than the context holds.
    """
    if not 0 <= cached <= context:
        raise LohaError(f"{cached} cached tokens in a context of {context}: expected 0 to {context}")
    stop = context + max(0, output - 1)
    # An engine always computes the last position, from which it samples.
    start = min(cached, max(0, context - 1))
    return (stop - start) * linear_flops(shape) + attention_flops(shape, start, stop) + output * head_flops(shape)


def encoder_flops(shape: ModelShape, tokens: int, *, window: int = 1024, attention: bool = True) -> int:
    """Return the operations of encoding tokens in independent causal windows.

    Args:
        shape: the encoder's.
        tokens: source tokens.
        window: tokens per window. All but the last window are taken as full, as if the tokens were one body: for many
            short observations this is an upper bound of the attention part (at most 13 % for the 0.6B encoder).
        attention: count attention; without it the figure is the paper's.
    """
    linear = tokens * linear_flops(shape)
    if not attention:
        return linear
    whole, rest = divmod(tokens, window)
    return linear + whole * attention_flops(shape, 0, window) + attention_flops(shape, 0, rest)


def adapter_flops(encoder_width: int, decoder_width: int, latents: int) -> int:
    """Return the operations of the two-layer adapter."""
    return 2 * latents * (encoder_width * decoder_width + decoder_width * decoder_width)


def patch_flops(shape: ModelShape, rank: int) -> int:
    """Return the operations of an unmerged reading patch for one token, forward only."""
    return 2 * shape.patch_parameters(rank)


def _pairs(start: int, stop: int, window: int | None) -> int:
    """Return the number of (query, key) pairs of positions [start, stop)."""
    if window is None or stop <= window:
        return _triangle(stop) - _triangle(start)
    full_from = max(start, window)
    return _triangle(max(window, start)) - _triangle(start) + (stop - full_from) * window


def _triangle(n: int) -> int:
    return n * (n + 1) // 2

"""vLLM's chat renderer with Hard-Last-K: messages in, token ids and latent observations out."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from vllm.config import VllmConfig
from vllm.renderers.hf import HfRenderer
from vllm.renderers.params import ChatParams
from vllm.utils.async_utils import make_async

from loha.errors import LohaError
from loha.messages import normalize_messages
from loha.render import Renderer
from loha.rendering import Rendering
from loha.serving_checkpoint import checkpoint_renderer
from serving.account import CURRENT, Report, RequestAccount
from serving.checkpoint import latent_identity
from serving.options import RequestOptions, resolve_options, server_defaults
from serving.pieces import Cutter, Piece, PlacedPiece
from serving.processor import MODALITY

OPTIONS_KEY = "loha"
"""Key of our options among the chat template's arguments."""

_NOT_TEMPLATE_VARIABLES = frozenset(
    {
        OPTIONS_KEY,
        "tools",
        "messages",
        "conversation",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
_REMEMBERED_PIECES = 200_000
_OTHER_TEMPLATES = 4
_OTHER_CACHE_BYTES = 64 << 20
"""Clients may send templates (with vLLM's --trust-request-chat-template); all of theirs together stay at 256 MiB."""


class LohaChatRenderer(HfRenderer):
    """Renders with `loha.render.Renderer`, the code that training uses, in vLLM's render thread."""

    def __init__(self, config: VllmConfig, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        hf_config = config.model_config.hf_config
        folder = config.model_config.tokenizer
        self._defaults = server_defaults()
        self._own = checkpoint_renderer(folder, hf_config)
        self._renderer_of = lru_cache(maxsize=_OTHER_TEMPLATES)(self._another)
        identity = latent_identity(config.model_config.model, hf_config, config.model_config.dtype)
        self._cutter = Cutter(self._own.settings, identity)
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._seen_lock = threading.Lock()  # there may be several render threads (--renderer-num-workers)
        self._render_in_thread = make_async(self._render, executor=self._executor)

    def render_messages(self, messages: list[Any], params: ChatParams) -> tuple[list[Any], Any]:
        """Render in the calling thread."""
        return self._render(messages, params, CURRENT.get())

    async def render_messages_async(self, messages: list[Any], params: ChatParams) -> tuple[list[Any], Any]:
        """Render off the event loop, under vLLM's time limit for templates."""
        return await self._render_with_timeout(self._render_in_thread(messages, params, CURRENT.get()))

    def _render(
        self, messages: Sequence[Any], params: ChatParams, account: RequestAccount | None
    ) -> tuple[list[Any], dict[str, Any]]:
        kwargs = params.chat_template_kwargs
        options = resolve_options(self._defaults, *(account or RequestAccount()).layers(kwargs.get(OPTIONS_KEY)))
        if kwargs.get("continue_final_message"):
            raise LohaError("continue_final_message is not supported by this server; end with a user or tool message")
        history = [_plain_message(message) for message in messages]
        rendering = self._rendering(history, params, options)
        placed = self._place(rendering)
        generates = account is None or account.counted
        new_tokens = self._remember(placed) if generates and self._fits(rendering) else 0
        if account is not None:
            account.add(Report.of(rendering, options, new_tokens))
        prompt: dict[str, Any] = {"prompt_token_ids": rendering.token_ids}
        if placed:
            prompt["multi_modal_data"] = {MODALITY: placed}
        # vLLM reads only the last message of the conversation (echo, continuation).
        return normalize_messages(history[-1:]), prompt

    def _rendering(self, history: list[Any], params: ChatParams, options: RequestOptions) -> Rendering:
        kwargs = params.chat_template_kwargs
        other = params.chat_template
        try:
            renderer = self._own if other is None else self._renderer_of(other)
            return renderer.render(
                history,
                kwargs.get("tools"),
                window=options.window,
                view=options.view,
                keep_tools=options.keep_tools,
                add_generation_prompt=bool(kwargs.get("add_generation_prompt", True)),
                template_kwargs=_template_variables(kwargs),
            )
        except RecursionError as error:
            raise LohaError("the messages are nested too deeply") from error
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            if other is None:
                raise
            raise LohaError(f"the chat template fails: {type(error).__name__}: {error}") from error

    def _another(self, template: str) -> Renderer:
        """Return a renderer of the checkpoint with another chat template, for the server or for one request."""
        return Renderer(
            self._own.tokenizer,
            encoder_tokenizer=self._own.encoder_tokenizer,
            settings=self._own.settings,
            placeholder_id=self._own.placeholder_id,
            chat_template=template,
            cache_bytes=_OTHER_CACHE_BYTES,
        )

    def _place(self, rendering: Rendering) -> list[PlacedPiece]:
        placed = []
        for latent in rendering.latents:
            start = latent.start
            for piece in self._cutter.cut(latent.encoder_ids):
                placed.append(PlacedPiece(piece, start, rendering.context_tokens))
                start += piece.length
            assert start == latent.start + latent.count + 2, "pieces do not fill the latent segment"
        return placed

    def _fits(self, rendering: Rendering) -> bool:
        return rendering.context_tokens < self.model_config.max_model_len

    def _remember(self, placed: Iterable[PlacedPiece]) -> int:
        """Return the encoder tokens of pieces not met before, and remember them."""
        with self._seen_lock:
            return sum(self._remember_piece(item.piece) for item in placed)

    def _remember_piece(self, piece: Piece) -> int:
        if piece.digest in self._seen:
            self._seen.move_to_end(piece.digest)
            return 0
        self._seen[piece.digest] = None
        if len(self._seen) > _REMEMBERED_PIECES:
            self._seen.popitem(last=False)
        return len(piece.token_ids)


def _template_variables(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key not in _NOT_TEMPLATE_VARIABLES and value is not None}


def _plain_message(message: Any) -> Any:
    """Return the message as clients sent it.

    vLLM hands content lists over as one-shot validators, and reasoning under `reasoning`, where templates and recorded
    trajectories say `reasoning_content`.
    """
    if not isinstance(message, Mapping):
        return message
    plain = dict(message)
    content = plain.get("content")
    if content is not None and not isinstance(content, (str, bytes, Mapping)) and isinstance(content, Iterable):
        plain["content"] = list(content)
    if isinstance(plain.get("reasoning"), str):
        plain.setdefault("reasoning_content", plain["reasoning"])
    return plain

"""The student: the frozen base with a reading patch, trainable gains, and a latent encoder with its adapter."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from loha.adapter import Adapter
from loha.attention import Pieces
from loha.decoder import load_decoder, wrap_mlps, wrap_norms, wrap_projections
from loha.encoder import EncoderSettings, LatentEncoder, use_packed_attention
from loha.errors import LohaError
from loha.fingerprint import Fingerprint, require_match, weights_hash
from loha.gains import GainRMSNorm
from loha.lclm import CONFIG_NAME as LCLM_CONFIG_NAME
from loha.lclm import find_lclm, load_encoder
from loha.lowrank import LowRankLinear
from loha.mlp import LeanMLP
from loha.render import Renderer
from loha.rendering import LatentSettings
from loha.student_files import StudentConfig, StudentFiles
from loha.tokenizer_dir import load_tokenizer

GROUPS = ("patch", "gains", "adapter")
LatentRegion = tuple[int, torch.Tensor]
"""(position of the start marker, 1-D encoder ids of the body)."""


class Student(nn.Module):
    """Base + reading patch + gains + adapter. Only the last three train.

    Args:
        decoder: the base, a Hugging Face causal LM; projections and norms are wrapped in place, all else is frozen.
        latent_encoder: frozen.
        adapter: float32.
        markers: float32 `[2, D]`, the input vectors around a latent region; frozen.
        config: what `student.json` holds.
        ranks: rank of each projection by name; all others stay unwrapped.
    """

    def __init__(
        self,
        decoder: nn.Module,
        latent_encoder: LatentEncoder,
        adapter: Adapter,
        markers: torch.Tensor,
        config: StudentConfig,
        ranks: dict[str, int],
    ) -> None:
        super().__init__()
        decoder.requires_grad_(False)
        use_packed_attention(decoder)
        decoder.config.use_cache = False
        wrap_projections(decoder, ranks)
        wrap_norms(decoder)
        wrap_mlps(decoder)
        self.decoder: Any = decoder
        self.latent_encoder = latent_encoder
        self.adapter = adapter.requires_grad_(True)
        self.markers = nn.Parameter(markers.float(), requires_grad=False)
        self.config = config
        self._renderer: Renderer | None = None

    # -- forward --------------------------------------------------------------------------------------------------

    def forward(
        self,
        token_ids_T: torch.Tensor,
        latent_regions: Sequence[LatentRegion],
        position_ids_1T: torch.Tensor,
        lengths: Sequence[int],
    ) -> torch.Tensor:
        """Return the hidden states of a packed row: `input_embeds`, then `hidden`."""
        return self.hidden(self.input_embeds(token_ids_T, latent_regions).unsqueeze(0), position_ids_1T, lengths)

    def input_embeds(self, token_ids_T: torch.Tensor, latent_regions: Sequence[LatentRegion]) -> torch.Tensor:
        """Return the input vectors of a row: token embeddings, with latent regions filled in.

        Args:
            token_ids_T: decoder ids; all positions of a latent region hold the placeholder id.
            latent_regions: as in `Rendering.latents`, in order of position.

        Returns:
            `[T, D]` in the dtype of the base; the gradient reaches the adapter through the latents.

        Raises:
            LohaError: when a region is not as long as its body's latents and two markers.
        """
        embedding = self.decoder.get_input_embeddings()
        embeds_TD = embedding(token_ids_T.to(embedding.weight.device))
        if not latent_regions:
            return embeds_TD
        latents = self.latents([ids for _, ids in latent_regions])
        start_1D, end_1D = self.markers.to(embeds_TD.dtype).split(1)
        parts, done = [], 0
        for (start, _), latents_LD in zip(latent_regions, latents, strict=True):
            stop = start + len(latents_LD) + 2
            self._check_region(token_ids_T, done, start, stop, [s for s, _ in latent_regions])
            parts += [embeds_TD[done:start], start_1D, latents_LD.to(embeds_TD.dtype), end_1D]
            done = stop
        return torch.cat([*parts, embeds_TD[done:]])

    def latents(self, encoder_ids: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the latents of observations: one float32 `[count, D]` each, differentiable by the adapter."""
        pooled = self.latent_encoder(encoder_ids)
        return list(self.adapter(torch.cat(pooled)).split([len(p) for p in pooled]))

    def hidden(self, embeds_1TD: torch.Tensor, position_ids_1T: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Return final-norm hidden states of a packed row.

        Args:
            embeds_1TD: input vectors.
            position_ids_1T: positions; consecutive from 0 in each piece.
            lengths: of the pieces, in order; they cover the row. A token attends causally within its piece only.

        Returns:
            `[1, T, D]`.
        """
        assert sum(lengths) == embeds_1TD.shape[1], f"pieces of {sum(lengths)} tokens in a row of {embeds_1TD.shape[1]}"
        # Never a 2-D mask, never a cache: either would make transformers attend across the pieces.
        return self.decoder.model(
            inputs_embeds=embeds_1TD,
            position_ids=position_ids_1T.to(embeds_1TD.device),
            attention_mask=None,
            use_cache=False,
            pieces=Pieces.of(lengths, embeds_1TD.device),
        ).last_hidden_state

    @torch.no_grad()
    def greedy(
        self, embeds_TD: torch.Tensor, *, max_new_tokens: int, stop_ids: frozenset[int] = frozenset()
    ) -> list[int]:
        """Return the most likely continuation of one text, with a cache: for probes during training.

        Args:
            embeds_TD: input vectors, as from `input_embeds`.
            max_new_tokens: at most this many.
            stop_ids: end the reply; the one that comes is its last id.
        """
        training = self.training
        self.eval()  # gradient checkpointing would drop the cache
        cache = DynamicCache(config=self.decoder.config)
        embedding = self.decoder.get_input_embeddings()
        inputs_1TD = embeds_TD.unsqueeze(0)
        new_ids: list[int] = []
        try:
            while len(new_ids) < max_new_tokens and (not new_ids or new_ids[-1] not in stop_ids):
                states = self.decoder.model(inputs_embeds=inputs_1TD, past_key_values=cache, use_cache=True)
                logits_V = states.last_hidden_state[0, -1] @ self.lm_head_weight.t()
                new_ids.append(int(logits_V.argmax()))
                inputs_1TD = embedding(torch.tensor([new_ids[-1:]], device=embeds_TD.device))
        finally:
            self.train(training)
        return new_ids

    @property
    def lm_head_weight(self) -> torch.Tensor:
        """The frozen `[V, D]` output matrix."""
        return self.decoder.lm_head.weight

    @contextmanager
    def patch_disabled(self) -> Iterator[None]:
        """Within the block the decoder is the base bit for bit: patch off, gains at the base's. No gradients."""
        modules = [m for m in self.decoder.modules() if isinstance(m, LowRankLinear | GainRMSNorm)]
        for module in modules:
            module.enabled = False
        try:
            with torch.no_grad():
                yield
        finally:
            for module in modules:
                module.enabled = True

    # -- training -------------------------------------------------------------------------------------------------

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters under stable names, sorted: `adapter.*`, `gains.*`, `patch.*`."""
        named: dict[str, nn.Parameter] = {f"adapter.{name}": p for name, p in self.adapter.named_parameters()}
        for name, module in self.decoder.named_modules():
            if isinstance(module, LowRankLinear):
                named |= {f"patch.{name}.A": module.A, f"patch.{name}.B": module.B}
            elif isinstance(module, GainRMSNorm):
                named[f"gains.{name}"] = module.gain
        return dict(sorted(named.items()))

    def groups(self) -> dict[str, dict[str, nn.Parameter]]:
        """Return `trainable()` split into patch, gains and adapter."""
        named = self.trainable()
        return {group: {n: p for n, p in named.items() if n.startswith(group + ".")} for group in GROUPS}

    def enable_checkpointing(self, *, offload: bool = False, mlp_chunks: int = 1) -> None:
        """Recompute each decoder layer in the backward pass (non-reentrant).

        Args:
            offload: keep the layer inputs in pinned host memory; ignored without a GPU.
            mlp_chunks: token chunks of the MLP, each checkpointed on its own within its layer.
        """
        self.decoder.gradient_checkpointing_enable(
            {"use_reentrant": False}, offload=offload and torch.cuda.is_available()
        )
        # transformers makes embeddings ask for gradients, which only reentrant checkpoints need: the first layer would
        # compute a gradient of its input that nothing uses.
        self.decoder.disable_input_require_grads()
        for module in self.decoder.modules():
            if isinstance(module, LeanMLP):
                module.chunks = mlp_chunks

    # -- files ----------------------------------------------------------------------------------------------------

    def renderer(self) -> Renderer:
        """Return the renderer for this student's base, encoder and settings."""
        if self._renderer is None:
            self._renderer = build_renderer(self.config)
        return self._renderer

    def files(self) -> StudentFiles:
        """Return what `save` writes, as float32 tensors on the CPU."""
        patch, gains = {}, {}
        for name, module in self.decoder.named_modules():
            if isinstance(module, LowRankLinear):
                patch[name] = (module.A.detach().cpu(), module.B.detach().cpu())
            elif isinstance(module, GainRMSNorm):
                gains[name] = module.gain.detach().cpu()
        adapter = {name: p.detach().cpu() for name, p in self.adapter.named_parameters()}
        return StudentFiles(self.config, patch, gains, adapter, self.markers.detach().cpu())

    def save(self, folder: str | Path) -> None:
        """Write the student (patch, gains, adapter, markers, config); never the frozen weights."""
        self.files().write(folder)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        base: str | Path | None = None,
        lclm: str | Path | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        verify: bool = True,
    ) -> Student:
        """Load a student and the frozen models that it stands on.

        Args:
            folder: made by `save` or `loha init`.
            base: folder of the base, when it has moved.
            lclm: LCLM or encoder folder, when it has moved.
            dtype: of the frozen weights and of the computation; the base's own by default.
            device: where to put everything.
            verify: compare the fingerprints of base, encoder, tokenizers and template.

        Raises:
            LohaError: when a part is missing, or is not what the student was made with.
        """
        files = StudentFiles.read(folder)
        config = dataclasses.replace(
            files.config,
            base=str(base or files.config.base),
            encoder=str(encoder_folder(lclm) if lclm else files.config.encoder),
        )
        if verify:
            verify_parts(config, student=str(folder))
        decoder = load_decoder(config.base, dtype=dtype, device=device)
        encoder = load_encoder(Path(config.encoder), dtype=decoder.dtype).to(device)
        settings = EncoderSettings(ratio=config.ratio, window=config.window)
        adapter = Adapter.from_tensors(files.adapter, source=str(folder))
        student = cls(
            decoder,
            LatentEncoder(encoder, settings),
            adapter,
            files.markers,
            config,
            {name: A.shape[0] for name, (A, _) in files.patch.items()},
        )
        student._fill(files, str(folder))
        return student.to(device)

    @torch.no_grad()
    def _fill(self, files: StudentFiles, folder: str) -> None:
        modules = dict(self.decoder.named_modules())
        norms = {name for name, module in modules.items() if isinstance(module, GainRMSNorm)}
        if norms != set(files.gains):
            raise LohaError(
                f"{folder}: gains do not fit the base: {sorted(norms ^ set(files.gains))[0]!r} has no partner"
            )
        pairs: list[tuple[str, torch.Tensor, torch.Tensor]] = [(n, modules[n].gain, t) for n, t in files.gains.items()]
        for name, (A, B) in files.patch.items():
            pairs += [(name, modules[name].A, A), (name, modules[name].B, B)]
        for name, parameter, tensor in pairs:
            if parameter.shape != tensor.shape:
                got, expected = list(tensor.shape), list(parameter.shape)
                raise LohaError(f"{folder}: {name} has a tensor of shape {got}, the base asks for {expected}")
            parameter.copy_(tensor)

    @staticmethod
    def _check_region(ids: torch.Tensor, done: int, start: int, stop: int, starts: list[int]) -> None:
        placeholder = ids[start] if 0 <= start < len(ids) else None
        fits = done <= start and stop <= len(ids) and bool((ids[start:stop] == placeholder).all())
        # Two more, not one: the padding token of some bases is their end of turn, which may follow a region.
        longer = len(ids) > stop + 1 and bool((ids[stop : stop + 2] == placeholder).all()) and stop not in starts
        if not fits or longer:
            raise LohaError(
                f"latent region at position {start} is not {stop - start} placeholders (latents and two markers) long; "
                "was the row rendered with another ratio or window?"
            )


def encoder_folder(folder: str | Path) -> Path:
    """Return the encoder's folder of an LCLM checkpoint, or the folder itself when it is a bare encoder."""
    path = Path(folder)
    is_lclm = (path / LCLM_CONFIG_NAME).is_file() or not (path / "config.json").is_file()
    return find_lclm(path) / "encoder" if is_lclm else path


def build_renderer(config: StudentConfig) -> Renderer:
    """Return the renderer of a student from the tokenizers beside its base and its encoder."""
    return Renderer(
        load_tokenizer(config.base),
        encoder_tokenizer=load_tokenizer(config.encoder),
        settings=LatentSettings(ratio=config.ratio, window=config.window),
    )


def make_fingerprint(config: StudentConfig) -> Fingerprint:
    """Return the fingerprint of the parts that a student stands on."""
    weights: Fingerprint = {
        "base_weights": weights_hash(config.base),
        "encoder_weights": weights_hash(config.encoder),
    }
    return weights | build_renderer(config).fingerprint


def verify_parts(config: StudentConfig, *, student: str) -> None:
    """Check that base, encoder, tokenizers and template are those that a student was made with.

    Raises:
        LohaError: names the part and both sides.
    """
    for folder, option in ((config.base, "base"), (config.encoder, "lclm")):
        if not Path(folder).is_dir():
            raise LohaError(f"{student} was made with {folder}, which is not there; say where it is with {option}")
    require_match(
        make_fingerprint(config),
        config.fingerprint,
        found_in=f"base {config.base} with encoder {config.encoder}",
        expected_by=f"student {student}",
    )

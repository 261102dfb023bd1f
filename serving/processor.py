"""The observation modality: from placed pieces to what vLLM's engine schedules, hashes and caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm.exceptions import VLLMValidationError
from vllm.inputs import MultiModalInput, mm_input
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldConfig,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.multimodal.parse import MultiModalDataParser, ProcessorBatchItems
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    ProcessorInputs,
)

from loha.layout import latent_count
from loha.rendering import LatentSettings
from serving.pieces import FIRST, LAST, Piece, PlacedPiece, max_item_length, windows_per_item

MODALITY = "observation"


class ObservationItems(ProcessorBatchItems[PlacedPiece]):
    """The pieces of one prompt."""

    def __init__(self, data: Sequence[PlacedPiece]) -> None:
        super().__init__(data, MODALITY)

    def get_processor_data(self) -> Mapping[str, object]:
        """Return nothing: no Hugging Face processor is involved."""
        return {}


class ObservationParser(MultiModalDataParser):
    """Knows one modality; images, audio and video are refused by name."""

    def _get_subparsers(self) -> Mapping[str, Any]:
        return {MODALITY: _parse}


class ObservationInfo(BaseProcessingInfo):
    """Limits of the modality."""

    def get_data_parser(self) -> MultiModalDataParser:
        """Return the parser of placed pieces."""
        return ObservationParser()

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Allow any number of items: the context length is the limit."""
        return {MODALITY: None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        """Return the vectors of the largest item, from which vLLM sizes the encoder budget."""
        return {MODALITY: max_item_length(latent_settings(self.get_hf_config()))}


class ObservationDummies(BaseDummyInputsBuilder[ObservationInfo]):
    """Items for the engine's profiling run. They carry no COUNTED flag, so no counter sees them."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        """Return no text: `ObservationProcessor.get_dummy_inputs` builds the ids itself."""
        return ""

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> dict[str, Any]:
        """Return the largest pieces, placed one after the other."""
        settings = latent_settings(self.info.get_hf_config())
        tokens = windows_per_item(settings) * settings.window
        length = latent_count(tokens, ratio=settings.ratio, window=settings.window) + 2
        count = mm_counts.get(MODALITY, 0)
        ids = np.zeros(tokens, dtype=np.int32)
        return {
            MODALITY: [
                PlacedPiece(Piece(ids, FIRST | LAST, length, f"dummy-{i}"), i * length, count * length)
                for i in range(count)
            ]
        }


class ObservationProcessor(BaseMultiModalProcessor[ObservationInfo]):
    """Takes prompts that are already token ids with placeholders, so it never searches a prompt for them."""

    def _get_mm_fields_config(
        self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {
            "observation_ids": MultiModalFieldConfig.batched(MODALITY),
            "observation_flags": MultiModalFieldConfig.batched(MODALITY, keep_on_cpu=True),
        }

    def _get_prompt_updates(self, *args: Any, **kwargs: Any) -> list[Any]:
        return []

    def get_dummy_inputs(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Mapping[str, Any]
    ) -> ProcessorInputs:
        """Return a prompt of nothing but the dummy items."""
        data = self.dummy_inputs.get_dummy_mm_data(seq_len, mm_counts, mm_options)
        tokens = sum(placed.piece.length for placed in data[MODALITY])
        prompt = [self.info.get_hf_config().placeholder_token_id] * tokens
        return ProcessorInputs(prompt=prompt, mm_data_items=self.info.parse_mm_data(data, validate=False))

    def apply(self, inputs: ProcessorInputs, timing_ctx: Any) -> MultiModalInput:
        """Return the engine's input: ids as they are, items, content hashes and places.

        The items go along with every request (4 bytes a source token). vLLM's sender cache would save that, but
        it drifts from the engine's when a request fails between the two.

        Raises:
            VLLMValidationError: when vLLM has cut or padded the prompt after it was rendered.
        """
        placed: list[PlacedPiece] = inputs.mm_data_items[MODALITY].get_all()
        prompt = inputs.prompt
        if any(item.prompt_tokens != len(prompt) for item in placed):
            raise VLLMValidationError(
                "truncate_prompt_tokens and pad_prompt_tokens cannot be combined with latent observations; "
                'shorten the messages or ask for {"loha": {"view": "full"}}',
                parameter="truncate_prompt_tokens",
            )
        return mm_input(
            prompt_token_ids=prompt,
            mm_kwargs=MultiModalKwargsItems({MODALITY: [_kwargs_item(item.piece) for item in placed]}),
            mm_hashes={MODALITY: [item.piece.digest for item in placed]},
            mm_placeholders={
                MODALITY: [PlaceholderRange(offset=item.start, length=item.piece.length) for item in placed]
            },
        )


def latent_settings(hf_config: Any) -> LatentSettings:
    """Return ratio and window of a serving checkpoint."""
    return LatentSettings(ratio=hf_config.compression_ratio, window=hf_config.encoder_window)


def _parse(data: Any) -> ObservationItems | None:
    return ObservationItems(list(data)) if len(data) else None


def _kwargs_item(piece: Piece) -> MultiModalKwargsItem:
    return MultiModalKwargsItem(
        {
            "observation_ids": MultiModalFieldElem(
                data=torch.from_numpy(piece.token_ids), field=MultiModalBatchedField()
            ),
            "observation_flags": MultiModalFieldElem(
                data=torch.tensor(piece.flags), field=MultiModalBatchedField(keep_on_cpu=True)
            ),
        }
    )

"""The launcher's self-test: one latent request, the running server against plain transformers on the same checkpoint.

The reference runs on the CPU in float32 with one module's weights in memory at a time, read from the checkpoint when
its turn comes. So it costs seconds and one matrix, never a second copy of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from loha.encoder import LatentEncoder
from loha.layout import MARKERS_PER_LATENT_OBSERVATION, Window
from loha.reference import ReferenceModel
from loha.rendering import Rendering
from loha.serving_checkpoint import ServingCheckpoint
from loha.weight_files import WeightFiles
from serving.endpoint import error_text
from serving.liveness import SelfTestFailed, probe_request

TOP = 20
"""Likeliest first tokens that are compared."""

TOLERANCES = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 0.15}
"""Largest mean difference of their log probabilities, in nats, by the number format that the server computes in."""


OTHER_IDS = "the server renders the messages to other token ids than the checkpoint's own template and tokenizer"


def self_test(client: httpx.Client, model: str, folder: Path, *, other_template: bool = False) -> str:
    """Compare the log probabilities of the likeliest first tokens of a reply.

    Args:
        client: with the server's base URL and credentials.
        model: name of the served model.
        folder: the serving checkpoint that the server should run.
        other_template: the server was given a template, or arguments of one, that are not the checkpoint's.

    Returns:
        What was seen, in one line.

    Raises:
        SelfTestFailed: naming the difference.
    """
    request = probe_request(model)
    served, dtype = _ask(client, request)
    reference = streamed_reference(folder)
    own = reference.renderer.render(request["messages"], window=Window(k=0), add_generation_prompt=True)
    rendering = as_served(own, served["prompt_token_ids"], reference.renderer.placeholder_id)
    if rendering != own and not other_template:
        raise SelfTestFailed(OTHER_IDS)
    expected_V = reference.logits(rendering)[-1].float().log_softmax(-1)
    got = {
        int(entry["token"].removeprefix("token_id:")): entry["logprob"]
        for entry in served["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    }
    difference = mean_difference(got, expected_V)
    tolerance = TOLERANCES.get(dtype, max(TOLERANCES.values()))
    seen = f"mean difference of {len(got)} log probabilities {difference:.2g} nats in {dtype}"
    if not difference <= tolerance:  # also refuses a NaN
        raise SelfTestFailed(
            f"on a latent request the server differs from this checkpoint in plain transformers: {seen}, allowed "
            f"{tolerance:g}; does it run the same files, and unquantised? (--no-self-test skips this)"
        )
    told = "" if rendering == own else ", on token ids of another template than the checkpoint's"
    return f"{seen}, allowed {tolerance:g}{told}"


def as_served(rendering: Rendering, token_ids: list[int], placeholder_id: int) -> Rendering:
    """Return a rendering of one latent observation with the token ids that a server read.

    They are others where the server was given a template or template arguments of its own.

    Raises:
        SelfTestFailed: when the ids do not hold the observation once and whole.
    """
    (latent,) = rendering.latents
    length = latent.count + MARKERS_PER_LATENT_OBSERVATION
    start = token_ids.index(placeholder_id) if placeholder_id in token_ids else 0
    if token_ids[start : start + length] != [placeholder_id] * length or token_ids.count(placeholder_id) != length:
        raise SelfTestFailed(
            f"the server reads {token_ids.count(placeholder_id)} latent positions where the checkpoint makes {length}"
        )
    return replace(rendering, token_ids=token_ids, latents=[replace(latent, start=start)])


def mean_difference(got: Mapping[int, float], expected_V: torch.Tensor) -> float:
    """Return the mean absolute difference over the tokens of `got`, in nats."""
    return sum(abs(value - float(expected_V[token])) for token, value in got.items()) / len(got)


def streamed_reference(folder: Path) -> ReferenceModel:
    """Return the reference on a checkpoint, its weights read module by module when they are needed.

    Raises:
        LohaError: when the folder is no complete serving checkpoint.
    """
    checkpoint = ServingCheckpoint.open(folder)
    config = checkpoint.config
    with torch.device("meta"):
        decoder = AutoModelForCausalLM.from_config(config.text_config, dtype=torch.float32, attn_implementation="sdpa")
        encoder = AutoModel.from_config(config.encoder_config, dtype=torch.float32)
    _stream(decoder, checkpoint.weights, "decoder.")
    _stream(encoder, checkpoint.weights, "encoder.", keep=encoder.get_input_embeddings())
    return ReferenceModel(
        checkpoint,
        decoder.eval(),
        LatentEncoder(encoder, checkpoint.settings),
        checkpoint.adapter().float(),
        checkpoint.weights.tensor("markers").float(),
    )


def _stream(model: Any, weights: WeightFiles, prefix: str, *, keep: nn.Module | None = None) -> None:
    """Make every module of a model on the meta device load its own weights before it runs and drop them after.

    Args:
        model: a Hugging Face model.
        weights: the checkpoint.
        prefix: of its names in the checkpoint.
        keep: a module that is loaded now and stays: the latent encoder asks where its embedding lies.
    """
    embedding = model.get_input_embeddings()
    shared = prefix + next(name for name, module in model.named_modules() if module is embedding) + ".weight"
    for name, module in model.named_modules():
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            for key, buffer in type(module)(config=module.config).named_buffers(recurse=False):
                module.register_buffer(key, buffer, persistent=False)  # rotary frequencies, in no checkpoint
        if module is keep:
            _load_hook(weights, f"{prefix}{name}.", shared, module, ())
        elif next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(partial(_load_hook, weights, f"{prefix}{name}.", shared))
            module.register_forward_hook(_drop_hook)


def _load_hook(weights: WeightFiles, prefix: str, shared: str, module: nn.Module, _args: Any) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        stored = prefix + name if prefix + name in weights else shared  # an output matrix tied to the embedding
        tensor = weights.tensor(stored, shape=tuple(parameter.shape)).float()
        setattr(module, name, nn.Parameter(tensor, requires_grad=False))


def _drop_hook(module: nn.Module, _args: Any, _output: Any) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(parameter.to("meta"), requires_grad=False))


def _ask(client: httpx.Client, request: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the server's answer with log probabilities by token id, and the number format that it computes in."""
    request = {**request, "logprobs": True, "top_logprobs": TOP}
    request |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    response = client.post("/v1/chat/completions", json=request)
    if response.status_code != 200:
        raise SelfTestFailed(
            f"a latent request with the {TOP} likeliest tokens was answered with HTTP {response.status_code}: "
            f"{error_text(response)} (--no-self-test skips this)"
        )
    card = client.get("/v1/models").json()["data"][0]
    return response.json(), str(card["loha"]["dtype"])

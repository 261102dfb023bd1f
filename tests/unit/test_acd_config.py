"""Configurations: every file in configs/ loads, and every mistake is named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from acd.config import config_yaml, load_config, parse_config
from loha.errors import LohaError

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL: dict[str, Any] = {
    "data": {"trajectories": "t.jsonl"},
    "model": {"student": "s"},
    "teacher": {"cache": "c"},
    "run": {"output_dir": "o"},
}


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_loads(path: Path, tmp_path: Path) -> None:
    if path.parent.name == "accelerate":
        from accelerate.commands.config.config_args import load_config_from_file

        launch = load_config_from_file(str(path))
        assert launch.num_processes % launch.num_machines == 0 and launch.mixed_precision == "no"
        assert str(launch.distributed_type).rpartition(".")[2] in ("NO", "MULTI_GPU"), "what the trainer knows"
        return
    config = load_config(path)
    (tmp_path / "again.yaml").write_text(config_yaml(config))
    assert load_config(tmp_path / "again.yaml") == config


@pytest.mark.parametrize("name", ["qwen3-4b", "swe-master-4b"])
def test_the_papers_recipe(name: str) -> None:
    config = load_config(CONFIGS / f"{name}.yaml")
    assert (config.optimizer.lr_patch, config.optimizer.lr_gains, config.optimizer.lr_adapter) == (1e-4, 1e-4, 5e-5)
    assert (config.packing.tokens_per_row, config.run.epochs, config.teacher.candidates) == (204_800, 1, 64)
    assert (config.loss.anchor_weight, config.loss.direction, config.readback.share) == (1.0, "forward", 0.03)
    assert config.views.latent_k == (0,)


def test_overrides(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(config_yaml(parse_config(SMALL, source="test")))
    words = ["--optimizer.lr-patch", "3e-4", "--views.latent-k", "0", "3", "--run.no-resume", "--data.limit", "7"]
    config = load_config(path, words)
    assert (config.optimizer.lr_patch, config.views.latent_k) == (3e-4, (0, 3))
    assert (config.run.resume, config.data.limit) == (False, 7)
    assert config.teacher.cache == "c"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"lr_pach": 1}}, "unknown key optimizer.lr_pach; did you mean optimizer.lr_patch?"),
        ({"packign": {}}, "unknown key packign; did you mean packing?"),
        ({"run": {}}, "run.output_dir is missing"),
        ({"optimizer": {"lr_patch": "fast"}}, "optimizer.lr_patch: .* got 'fast'"),
        ({"loss": {"direction": "sideways"}}, "loss.direction: .*forward.* got 'sideways'"),
        ({"packing": {"tokens_per_row": 7, "tokens_per_step": 20}}, "must be a multiple of packing.tokens_per_row"),
        ({"teacher": {}}, "teacher.cache is missing"),
        ({"teacher": {"cache": "c", "model": "m"}}, "teacher.anchor_cache must name a cache of the base"),
        ({"views": {"full_share": 1.5}}, "views.full_share must lie between 0 and 1, got 1.5"),
        ({"readback": {"templates": {"line": "which?"}}}, "must be line, path or value and hold {cue}"),
        ({"optimizer": {"lr_patch": -1}}, "optimizer.lr_patch must be a finite number of at least 0, got -1"),
        ({"optimizer": {"lr_gains": math.inf}}, "optimizer.lr_gains must be a finite number of at least 0, got inf"),
        ({"optimizer": {"max_grad_norm": -1}}, "optimizer.max_grad_norm must be a finite number of at least 0, got -1"),
        ({"optimizer": {"max_grad_norm": 0}}, "optimizer.max_grad_norm must be above 0, got 0; null does not clip"),
        ({"optimizer": {"epsilon": 0}}, "optimizer.epsilon must be above 0, got 0$"),
        ({"optimizer": {"beta1": 1.5}}, "optimizer.beta1 must be below 1, got 1.5"),
        ({"loss": {"anchor_weight": math.nan}}, "loss.anchor_weight must be a finite number of at least 0, got nan"),
        ({"packing": {"attention_tokens": 0}}, "packing.attention_tokens must be a finite number of at least 1, got 0"),
        ({"model": {"student": "s", "encoder_cache_gb": -1}}, "model.encoder_cache_gb must be a finite number"),
        ({"data": {"trajectories": "t", "limit": 0}}, "data.limit must be a finite number of at least 1, got 0"),
        ({"run": {"output_dir": "r", "keep_last": 0}}, "run.keep_last must be a finite number of at least 1, got 0"),
        ({"run": {"output_dir": "r", "seed": 2**32}}, r"run.seed must be below 2\*\*32"),
        ({"data": ["t.jsonl"]}, "data must be a mapping, got list"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LohaError, match=f"^conf.yaml: .*{message}") as error:
        parse_config(SMALL | changes, source="conf.yaml")
    assert "\n" not in str(error.value)


def test_a_file_extends_another(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    path = tmp_path / "c.yaml"
    path.write_text(config_yaml(parse_config(SMALL, source="test")))
    other = tmp_path / "below" / "d.yaml"
    other.write_text("extends: ../c.yaml\noptimizer: {lr_patch: 0.5}\nviews: {latent_k: [3]}\n")
    config = load_config(other)
    assert (config.optimizer.lr_patch, config.optimizer.lr_gains, config.views.latent_k) == (0.5, 1e-4, (3,))
    assert config.teacher.cache == "c"
    for text, message in (("d.yaml", "d.yaml: extends itself"), ("no.yaml", "no.yaml: no such"), ("[1]", "must name")):
        other.write_text(f"extends: {text}\n")
        with pytest.raises(LohaError, match=message):
            load_config(other)


def test_numbers_as_yaml_writes_them(tmp_path: Path) -> None:
    """YAML 1.1 reads 1e-4 without a point as text."""
    path = tmp_path / "c.yaml"
    path.write_text(config_yaml(parse_config(SMALL, source="test")) + "\n")
    text = path.read_text().replace("lr_patch: 0.0001", "lr_patch: 1e-4")
    assert "1e-4" in text
    path.write_text(text)
    assert load_config(path).optimizer.lr_patch == 1e-4


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(LohaError, match="no such configuration file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1")
    with pytest.raises(LohaError, match="not valid YAML"):
        load_config(tmp_path / "bad.yaml")

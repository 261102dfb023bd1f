"""Open the teacher caches of a run, checked against what the run uses."""

from __future__ import annotations

from acd.cache_teacher import teacher_fingerprint
from acd.config import Config
from acd.rows import TargetSource
from acd.teacher_cache import TeacherCache
from loha.lclm import load_config
from loha.render import Renderer
from loha.student_files import StudentConfig


def open_targets(config: Config, student: StudentConfig, renderer: Renderer) -> TargetSource:
    """Return where targets come from.

    Args:
        config: of the run.
        student: names the base.
        renderer: names tokenizer, template and layout.

    Raises:
        LohaError: when a cache is missing, damaged, was made with something else, or holds ids that the student's head
            lacks.
    """
    if config.teacher.mode == "live":
        return TargetSource()
    assert config.teacher.cache is not None, "the configuration checks this"
    base = teacher_fingerprint(student.base, renderer)
    distill = teacher_fingerprint(config.teacher.model, renderer) if config.teacher.model else base
    vocabulary = load_config(student.base).vocab_size
    cache = TeacherCache(config.teacher.cache, expected=distill, vocabulary=vocabulary)
    if not config.teacher.anchor_cache:
        return TargetSource(cache, cache)
    anchor = TeacherCache(config.teacher.anchor_cache, expected=base, vocabulary=vocabulary)
    return TargetSource(cache, anchor)

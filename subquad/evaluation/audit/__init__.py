"""Audit causal language models for leaks from later tokens, wrong caches, padding and batches. See `audit`."""

from subquad.evaluation.audit.adapters import Adapter
from subquad.evaluation.audit.auditor import AuditConfig, audit, replay
from subquad.evaluation.audit.report import AuditReport

__all__ = ["Adapter", "AuditConfig", "AuditReport", "audit", "replay"]

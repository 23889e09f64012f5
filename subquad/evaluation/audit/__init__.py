"""An audit of a causal language model: does what it computes now depend on what it may not know. See `audit`."""

from subquad.evaluation.audit.adapters import Adapter
from subquad.evaluation.audit.auditor import AuditConfig, audit, replay
from subquad.evaluation.audit.report import AuditReport, Check

__all__ = ["Adapter", "AuditConfig", "AuditReport", "Check", "audit", "replay"]

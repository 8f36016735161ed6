"""All that a google-adk process needs: the Host, session services for it, and limits for a run.

An extra: this package alone imports google-adk, and needs SQLAlchemy beside it.
"""

from agent_runtime.adk.plugin import TenantPolicyPlugin
from agent_runtime.adk.stores import sql_store
from agent_runtime.host import Host

__all__ = ["Host", "TenantPolicyPlugin", "sql_store"]

"""The rules of the audit, one file per family; `halfstep.core.audit.engine` checks records against them."""

"""What processes of tests/processes.py begin with."""

import transformers  # noqa: F401

import halfstep.integrations.transformers  # noqa: F401

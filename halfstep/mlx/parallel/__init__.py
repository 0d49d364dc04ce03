"""Several processes that train one model, on mx.distributed: what they sum, and what they agree on."""

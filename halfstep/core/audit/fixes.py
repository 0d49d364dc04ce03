"""What to do about a finding in the words of another framework: rules say it in those of torch."""

from dataclasses import replace

from halfstep.core.audit.finding import Finding

_MASTERS = (
    "Keep parameters in fp32 and cast them inside the loss function; `halfstep.jax.init` and `make_step` do so."
)
FIXES = {
    "jax": {
        "HS101": _MASTERS,
        "HS102": _MASTERS,
        "HS103": "Create adapters in fp32, and give all of them to the optimizer.",
        "HS104": "Moments follow the dtype of their parameter: keep parameters in fp32, and leave out `mu_dtype`.",
        "HS105": _MASTERS,
        "HS301": "Sum in fp32: give the loop the fp32 parameter, and cast it inside its body.",
        "HS302": "Widen before the sum: `lax.psum(x.astype(jnp.float32), axis)`.",
        "HS401": "Widen first and narrow the result: `norm(x.astype(jnp.float32)).astype(x.dtype)`; Flax's norms "
        "do so unless `force_float32_reductions=False`.",
        "HS402": "Widen first: `jax.nn.softmax(x.astype(jnp.float32))`.",
        "HS403": "Multiply in fp32: `x.astype(jnp.float32) @ router`, with an fp32 router.",
        "HS404": "Widen what goes into it: `logits.astype(jnp.float32)`.",
        "HS406": "Cast the result back where the two meet: `(x * table).astype(x.dtype)`.",
        "HS407": '`jax.config.update("jax_default_matmul_precision", "highest")`, or ignore the rule.',
        "HS410": "Scale the loss, as `fp16-mixed` does, and pass your own scale to the audit as `loss_scale`; "
        "if one layer alone is that small, run it in bf16 or fp32.",
    }
}


def in_words_of(framework: str, finding: Finding) -> Finding:
    """Returns a finding with the fix of a framework, if it differs."""
    return replace(finding, fix=FIXES.get(framework, {}).get(finding.rule, finding.fix))

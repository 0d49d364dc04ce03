"""What an audit sees of a training on MLX: formats of operations, weights, what happens to updates.

Unlike torch's collectors, these import other rooms of the backend (where a model keeps its arrays, which
optimizers hold state): MLX has no hooks that reach into a script, so they only run where all of halfstep does.
"""

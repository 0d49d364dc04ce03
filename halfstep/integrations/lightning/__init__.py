"""Lightning's Trainer and Fabric under a policy: one plugin for the Trainer, and a Fabric with `policy=`.

    trainer = lightning.Trainer(plugins=HalfstepPrecision("bf16-mixed"), gradient_clip_val=1.0)
    fabric = Fabric(policy="bf16-mixed")                # of this module

    backward        run.backward: Lightning has divided the loss by the number of micro-batches, so they are summed
    optimizer_step  runs the closure first, which holds the last micro-batch; then clipping; then run.update
    connect         the model is on its device and the optimizers exist: here the Trainer's run begins
    state_dict      the run's whole state, in Lightning's own checkpoint

**The checkpoint is Lightning's**, in one file. A file of ours beside it would stay behind when ModelCheckpoint
removes its own or when the user moves it, and Lightning also writes to remote file systems. What a plain Lightning
job reads, `state_dict` and `optimizer_states`, stays there in torch's format. torch.save writes storage that two
entries share once, so the run's state adds little.
"""

from halfstep.integrations.lightning.audit import AuditCallback as AuditCallback
from halfstep.integrations.lightning.fabric import Fabric as Fabric
from halfstep.integrations.lightning.sharded import ModelParallelStrategy as ModelParallelStrategy
from halfstep.integrations.lightning.trainer import HalfstepPrecision as HalfstepPrecision

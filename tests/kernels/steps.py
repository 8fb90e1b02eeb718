"""One step of entries, prepared and run."""

from memtrain.kernels.step.prepared import PreparedStep


def fused_step(entries):
    PreparedStep(entries).run()

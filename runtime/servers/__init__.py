"""A parameter server for all synchronisation models, whose transfers keep a planned order.

::

    policy = SSP(3)                                    # or BSP(), ASP(), ElasticBSP(15)
    plan = TransferPlan.for_model(model, workers=4, servers=1)
    if int(os.environ["RANK"]) >= plan.workers:
        Server(model, plan, torch.optim.SGD(model.parameters(), lr=0.1), policy).serve()
    else:
        with Worker(model, plan, policy, checkpoint="last.pt") as worker:
            for epoch in range(epochs):
                for batch in worker.batches(len(inputs), 32, epoch=epoch, seed=0):
                    with worker.step():
                        loss_function(model(inputs[batch]), labels[batch]).backward()

A worker may close or be lost at any time and the others go on; a lost server ends the run. With
``for_model(..., late=n)`` up to n more processes may join while the job runs: they do the same, without a rank.
:mod:`~.transfers` has the order, :mod:`~.policies` the models, :mod:`~.meeting` how the processes find each other.
"""

from __future__ import annotations

from ddltool.runtime.servers.meeting import Meeting
from ddltool.runtime.servers.planned import follow
from ddltool.runtime.servers.policies import ASP, BSP, SSP, ElasticBSP, SyncPolicy
from ddltool.runtime.servers.server import Server
from ddltool.runtime.servers.transfers import TransferError, TransferPlan, planned_priority
from ddltool.runtime.servers.worker import Worker, shard

__all__ = ["ASP", "BSP", "SSP", "ElasticBSP", "Meeting", "Server", "SyncPolicy", "TransferError", "TransferPlan"]
__all__ += ["Worker", "follow", "planned_priority", "shard"]

"""One parameter-server runtime for all synchronisation models: this module brings its parts together.

::

    policy = SSP(3)                                    # or BSP(), ASP(), ElasticBSP(15), LocalSGD(8), BackupWorkers(1)
    plan = TransferPlan.for_model(model, workers=4, servers=1)
    if rank >= plan.workers:
        SyncServer(model, plan, MomentumSGD(lr=0.1), policy).serve()
    else:
        with SyncWorker(model, plan, policy, checkpoint="last.pt") as worker:
            for epoch in range(epochs):
                for batch in worker.batches(len(inputs), 32, epoch=epoch, seed=0):
                    with worker.step():
                        loss_function(model(inputs[batch]), labels[batch]).backward()

The transfers are those of :mod:`ddltool.runtime.servers.transfers`, in the plan's order. A worker may close or be lost at any
time and the others go on (:mod:`~.membership`); a lost server ends the run. With ``for_model(..., late=n)`` and a store
as ``door`` of the servers, up to n more processes may join while the job runs, by ``SyncWorker(..., door=store)``
(:mod:`~.member_wire`).
"""

from __future__ import annotations

from ddltool.runtime.servers.elastic_bsp import ElasticBSP, Superstep
from ddltool.runtime.servers.membership import Membership, shard
from ddltool.runtime.servers.parameter_server import MomentumSGD, ParameterServer
from ddltool.runtime.servers.policies import ASP, BSP, SSP, BackupWorkers, LocalSGD, Policy
from ddltool.runtime.servers.sync_server import SyncServer
from ddltool.runtime.servers.sync_worker import SyncWorker
from ddltool.runtime.servers.transfers import TransferError, TransferPlan, planned_priority
from ddltool.runtime.servers.worker import Worker

__all__ = [
    "ASP",
    "BSP",
    "SSP",
    "BackupWorkers",
    "ElasticBSP",
    "LocalSGD",
    "Membership",
    "MomentumSGD",
    "ParameterServer",
    "Policy",
    "Superstep",
    "SyncServer",
    "SyncWorker",
    "TransferError",
    "TransferPlan",
    "Worker",
    "planned_priority",
    "shard",
]

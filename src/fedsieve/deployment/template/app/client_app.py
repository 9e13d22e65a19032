"""The client: runs on every node, on the rows that never leave it."""

from flwr.app import Context

from app.task import OBJECTIVE, rows
from fedsieve.deployment.config import deployment_config
from fedsieve.deployment.flower import make_client_app
from fedsieve.runtime.loop import LoopEngine


def client_engine_for(context: Context) -> LoopEngine:
    """What this node computes with."""
    client, clients = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    return deployment_config(context.run_config, OBJECTIVE).client_engine(client, *rows(client, clients))


app = make_client_app(client_engine_for)

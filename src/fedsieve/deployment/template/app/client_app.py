"""The client: runs on every node, on the rows that never leave it."""

from flwr.app import Context

from app.task import OBJECTIVE, rows
from fedsieve.deployment.config import plan_from
from fedsieve.deployment.flower import make_client_app
from fedsieve.runtime.loop import Loop


def site_for(context: Context) -> Loop:
    """What this node computes with."""
    client, clients = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    return plan_from(context.run_config, OBJECTIVE).site(client, *rows(client, clients))


app = make_client_app(site_for)

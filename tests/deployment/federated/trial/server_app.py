"""A server that leads one method after the other and records the packets of each."""

from fedsieve.deployment.flower import FlowerExchange, make_server_app
from fedsieve.deployment.server import run_server
from trial.task import plans, recorded


def lead_all(each, network):
    """Nodes announce themselves once for all methods."""
    for plan in each:
        over = FlowerExchange(plan, network.grid)
        over.directory = network.directory
        plan.run_dir.mkdir(parents=True, exist_ok=True)
        with recorded(plan.run_dir / "packets.json"):
            run_server(plan, over)


app = make_server_app(lambda context: [plan for _, plan in plans(context.run_config)], lead_all)

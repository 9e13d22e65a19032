"""A server that runs one algorithm after the other and records the packets of each."""

from fedsieve.deployment.flower import FlowerExchange, make_server_app
from fedsieve.deployment.server import run_server
from trial.task import deployments, record_packets


def run_all(all_deployments, first_exchange):
    """Run every deployment; nodes announce themselves once for all of them."""
    for deployment in all_deployments:
        exchange = FlowerExchange(deployment, first_exchange.grid)
        exchange.directory = first_exchange.directory
        deployment.run_dir.mkdir(parents=True, exist_ok=True)
        with record_packets(deployment.run_dir / "packets.json"):
            run_server(deployment, exchange)


app = make_server_app(lambda context: [deployment for _, deployment in deployments(context.run_config)], run_all)

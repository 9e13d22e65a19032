"""The server app. It runs the rounds and stores metrics, checkpoints and the model in `run-dir`."""

from flwr.app import Context

from app.task import OBJECTIVE, evaluate
from fedsieve.deployment.deployment_config import DeploymentConfig, deployment_config
from fedsieve.deployment.flower import make_server_app
from fedsieve.deployment.server import run_server


def deployment_for(context: Context) -> DeploymentConfig:
    """Return the settings of the run and the metrics the server computes after every round."""
    return deployment_config(context.run_config, OBJECTIVE, evaluate)


app = make_server_app(deployment_for, run_server)

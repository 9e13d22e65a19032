"""Deployments over Flower."""

"""Starts and stops a local fleet of real processes: vLLM servers, router, gateway."""

from eldr.cluster.errors import ClusterError, ConfigError
from eldr.cluster.local import FleetConfig, Layout, LocalFleet, plan_layout
from eldr.cluster.ports import free_ports
from eldr.cluster.readiness import http_ready, port_ready
from eldr.cluster.supervisor import Command, Supervisor
from eldr.cluster.vllm_server import EngineSettings, Leg, VllmServer

__all__ = [
    "ClusterError",
    "Command",
    "ConfigError",
    "EngineSettings",
    "FleetConfig",
    "Layout",
    "Leg",
    "LocalFleet",
    "Supervisor",
    "VllmServer",
    "free_ports",
    "http_ready",
    "plan_layout",
    "port_ready",
]

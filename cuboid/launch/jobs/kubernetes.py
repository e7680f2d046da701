"""A run as a plain indexed Job of Kubernetes (1.31 and later), with the headless Service that names its pods."""

from __future__ import annotations

from textwrap import indent

from cuboid.launch.jobs.job import Job
from cuboid.launch.jobs.pod import (
    PodOptions,
    configuration,
    failure_policy,
    in_pods,
    labels,
    metadata,
    pod_spec,
)

CONTAINER = "cuboid"


def manifest(job: Job, options: PodOptions, written_by: str) -> str:
    """The whole file: run file, Service, Job."""
    job = in_pods(job)
    parts = [configuration(job, options), *([_service(job, options)] if job.nodes > 1 else []), _job(job, options)]
    head = f"""# {job.summary}
# {job.placement}
# Written by: {written_by}
# Start it:  kubectl apply -f FILE     Stop it for good:  kubectl delete -f FILE
"""
    return head + "---\n".join(parts)


def _service(job: Job, options: PodOptions) -> str:
    return f"""# Gives pod N the name {job.name}-N.{job.name}; nothing outside the cluster is let in.
apiVersion: v1
kind: Service
metadata:
{indent(metadata(job, options), "  ")}
spec:
  clusterIP: None
  # Supervisors look for the first of them before it is ready.
  publishNotReadyAddresses: true
  selector: {labels(job)}
  ports:
    - {{name: rendezvous, port: {job.port}}}
"""


def _job(job: Job, options: PodOptions) -> str:
    host = f"{job.name}-0.{job.name}"
    subdomain = job.name if job.nodes > 1 else ""
    return f"""apiVersion: batch/v1
kind: Job
metadata:
{indent(metadata(job, options, labels=labels(job)), "  ")}
spec:
  # A pod is a node of the training; pods that end are made again under the same number.
  completionMode: Indexed
  completions: {job.nodes}
  parallelism: {job.nodes}
  # Supervisors start failed ranks again themselves; when they give up, all of them end: so many rounds of that.
  backoffLimit: {job.run.resilience.restarts * job.nodes}
{indent(failure_policy(CONTAINER), "  ")}
  template:
    metadata:
      labels: {labels(job)}
    spec:
{indent(pod_spec(job, options, CONTAINER, host, subdomain), "      ")}
"""

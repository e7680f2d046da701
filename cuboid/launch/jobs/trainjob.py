"""A run as a TrainJob of Kubeflow Trainer (2.2 and later), with the TrainingRuntime it refers to."""

from __future__ import annotations

from textwrap import indent

from cuboid.launch.jobs.job import Job
from cuboid.launch.jobs.pod import PodOptions, configuration, failure_policy, in_pods, labels, metadata, pod_spec

CONTAINER = "node"
"""The name Kubeflow gives the trainer's replicated job and its container."""


def manifest(job: Job, options: PodOptions, written_by: str) -> str:
    """The whole file: run file, TrainingRuntime, TrainJob."""
    job = in_pods(job)
    head = f"""# {job.summary}
# {job.placement}
# Written by: {written_by}
# Start it:  kubectl apply -f FILE     Stop it for good:  kubectl delete -f FILE
"""
    return head + "---\n".join([configuration(job, options), _runtime(job, options), _train_job(job, options)])


def _runtime(job: Job, options: PodOptions) -> str:
    # JobSet names the pods of its headless service by job, replica and index.
    host = f"{job.name}-{CONTAINER}-0-0.{job.name}"
    return f"""# A runtime of its own: a TrainJob cannot say what the end of a pod means.
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata:
{indent(metadata(job, options, labels="{trainer.kubeflow.org/framework: torch}"), "  ")}
spec:
  mlPolicy:
    numNodes: {job.nodes}
  template:
    spec:
      # The job is made anew when supervisors have given up, and resumes from its newest checkpoint.
      failurePolicy:
        maxRestarts: {job.run.resilience.restarts}
        rules:
          # The job's own policy says which end of a pod nothing can mend.
          - {{name: refused, action: FailJobSet, onJobFailureReasons: [PodFailurePolicy]}}
      replicatedJobs:
        - name: {CONTAINER}
          template:
            metadata:
              labels: {{trainer.kubeflow.org/trainjob-ancestor-step: trainer}}
            spec:
              backoffLimit: 0
{indent(failure_policy(CONTAINER), " " * 14)}
              template:
                metadata:
                  labels: {labels(job)}
                spec:
{indent(pod_spec(job, options, CONTAINER, host), " " * 18)}
"""


def _train_job(job: Job, options: PodOptions) -> str:
    return f"""apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
{indent(metadata(job, options, labels=labels(job)), "  ")}
spec:
  runtimeRef: {{kind: TrainingRuntime, name: {job.name}}}
  trainer:
    numNodes: {job.nodes}
"""

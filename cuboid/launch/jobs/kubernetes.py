"""A run on Kubernetes: the pod of a node, in a plain indexed Job or in a TrainJob of Kubeflow Trainer."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from textwrap import indent

from cuboid.errors import UserError
from cuboid.launch.jobs.job import REFUSED, Job
from cuboid.resilience.preemption import REQUEUE
from cuboid.secure_channel import VALUE
from cuboid.spec.run import dump_run

# The pod that holds a node's supervisor and its ranks, the same for a plain Job and for a TrainJob.


RUN_FILE = "/etc/cuboid/run.toml"
"""Where the run file lies in a pod: it comes with the job, in a ConfigMap."""

GATHER = 600.0
"""Seconds an elastic job waits for all its nodes as it starts: images are pulled at different speeds."""


@dataclass(frozen=True, kw_only=True)
class PodOptions:
    image: str
    claim: str
    """The PersistentVolumeClaim that all nodes share, for the run's folder and its data."""
    namespace: str = ""
    mount: str = "/workspace"
    user: int = 1000
    cpus: int | None = None
    """Cores of a node; default: no limit is asked for."""
    memory: str = ""
    secret: str = ""
    """A Secret whose entries become environment variables; only its name is written."""
    gpu_resource: str = "nvidia.com/gpu"

    def __post_init__(self) -> None:
        for name in ("image", "claim", "namespace", "mount", "memory", "secret", "gpu_resource"):
            if re.search(r"\s", getattr(self, name)):
                raise UserError(f"{name}={getattr(self, name)!r} has a space in it; use a name without")
        if self.user < 1:
            raise UserError(f"user={self.user} is root, which a training need not be; use the number of another user")
        if not self.mount.startswith("/"):
            raise UserError(f"mount={self.mount} is not an absolute path; use one such as /workspace")
        if self.memory and not re.fullmatch(r"\d+(\.\d+)?([KMGTP]i?)?", self.memory):
            raise UserError(f"memory={self.memory} is not an amount of Kubernetes; use one such as 512Gi")


def in_pods(job: Job) -> Job:
    """The job as pods see it: the run file, with what the command line changes, comes in the ConfigMap."""
    if job.min_nodes < job.nodes:
        job = job.waiting(gather_seconds=GATHER)
    return replace(job, file=RUN_FILE, overrides=())


def quoted(text: str) -> str:
    """A string of YAML, whatever is in it."""
    return json.dumps(text, ensure_ascii=False)


def metadata(job: Job, options: PodOptions, **more: str) -> str:
    """The lines under `metadata:`."""
    place = [f"namespace: {quoted(options.namespace)}"] if options.namespace else []
    extra = [f"{key}: {value}" for key, value in more.items()]
    return "\n".join([f"name: {job.name}", *place, *extra])


def configuration(job: Job, options: PodOptions) -> str:
    """The run file as a ConfigMap."""
    return f"""apiVersion: v1
kind: ConfigMap
metadata:
{indent(metadata(job, options), "  ")}
data:
  run.toml: |
{indent(dump_run(job.run), "    ")}"""


def failure_policy(container: str) -> str:
    """What a pod's end means; the lines of a Job's spec."""
    return f"""podFailurePolicy:
  rules:
    # Told to stop, saved: start me again, and do not count it.
    - action: Ignore
      onExitCodes: {{containerName: {container}, operator: In, values: [{REQUEUE}]}}
    # Preempted, drained or evicted: neither.
    - action: Ignore
      onPodConditions: [{{type: DisruptionTarget, status: "True"}}]
    # Refused in one sentence, which starting again cannot mend.
    - action: FailJob
      onExitCodes: {{containerName: {container}, operator: In, values: [{REFUSED}]}}"""


def pod_spec(job: Job, options: PodOptions, container: str, host: str, subdomain: str = "") -> str:
    """The lines under the pod template's `spec:`."""
    belongs = f"subdomain: {subdomain}\n" if subdomain else ""
    return f"""restartPolicy: Never
# SIGTERM, then so long until SIGKILL: time for the step in flight and a checkpoint.
terminationGracePeriodSeconds: {job.notice_seconds}
{belongs}# Nothing here speaks to the cluster, so no token is given away.
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {options.user}
  fsGroup: {options.user}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {{type: RuntimeDefault}}
# One supervisor a node: two pods of this job never share one.
affinity:
  podAntiAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector: {{matchLabels: {{app.kubernetes.io/instance: {job.name}}}}}
containers:
  - name: {container}
    image: {quoted(options.image)}
    workingDir: {quoted(options.mount)}
    command: {_command(job, host)}
{indent(_ports(job) + _secret(job, options) + _resources(job, options), "    ")}    securityContext:
      allowPrivilegeEscalation: false
      capabilities: {{drop: [ALL]}}
    volumeMounts:
      - {{name: run-file, mountPath: /etc/cuboid, readOnly: true}}
      - {{name: shared, mountPath: {quoted(options.mount)}}}
      - {{name: shared-memory, mountPath: /dev/shm}}
volumes:
  - name: run-file
    configMap: {{name: {job.name}}}
  # What the run writes (metrics, checkpoints) and reads must be the same files on every node.
  - name: shared
    persistentVolumeClaim: {{claimName: {quoted(options.claim)}}}
  # Ranks of a node communicate through shared memory, of which a container has 64 MB unless told.
  - name: shared-memory
    emptyDir: {{medium: Memory}}"""


def labels(job: Job) -> str:
    return f"{{app.kubernetes.io/name: cuboid, app.kubernetes.io/instance: {job.name}}}"


def _command(job: Job, host: str) -> str:
    # No shell: the supervisor is the first process of the container, so that SIGTERM reaches it.
    return "[" + ", ".join(quoted(word) for word in job.command(host)) + "]"


def _ports(job: Job) -> str:
    if job.nodes == 1:
        return ""
    return f"ports:\n  - {{name: rendezvous, containerPort: {job.port}}}\n"


def _secret(job: Job, options: PodOptions) -> str:
    lines = []
    if job.nodes > 1:
        lines = [
            "# What supervisors prove to each other that they know; without it they make one in the run's folder.",
            "env:",
            f"  - name: {VALUE}",
            f"    valueFrom: {{secretKeyRef: {{name: {job.name}-secret, key: secret, optional: true}}}}",
        ]
    if options.secret:
        lines += [
            "# Only the name: what it holds stays in the cluster.",
            "envFrom:",
            f"  - secretRef: {{name: {quoted(options.secret)}}}",
        ]
    return "".join(f"{line}\n" for line in lines)


def network_policy(job: Job, options: PodOptions) -> str:
    """Of a job on many nodes: NCCL, gloo and PyTorch's store believe whoever reaches them, so nobody else may."""
    return f"""# Only pods of this job reach pods of this job, where the cluster's network enforces policies.
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
{indent(metadata(job, options), "  ")}
spec:
  podSelector: {{matchLabels: {labels(job)}}}
  policyTypes: [Ingress]
  ingress:
    - from:
        - podSelector: {{matchLabels: {labels(job)}}}
"""


def _head(job: Job, options: PodOptions, written_by: str) -> str:
    place = f"-n {options.namespace} " if options.namespace else ""
    made = f"kubectl {place}create secret generic {job.name}-secret --from-literal=secret=$(openssl rand -hex 32)"
    secret = f"# Make its secret once:  {made}\n" if job.nodes > 1 else ""
    return f"""# {job.summary}
# {job.placement}
# Written by: {written_by}
{secret}# Start it:  kubectl apply -f FILE     Stop it for good:  kubectl delete -f FILE
"""


def _resources(job: Job, options: PodOptions) -> str:
    limits = [
        *([f"{options.gpu_resource}: {job.ranks_per_node}"] if job.gpus else []),
        *([f"cpu: {options.cpus}"] if options.cpus else []),
        *([f"memory: {options.memory}"] if options.memory else []),
    ]
    if not limits:
        return ""
    lines = "\n".join(f"    {limit}" for limit in limits)
    return f"resources:  # requests are what limits say, so that the node is the pod's own\n  limits:\n{lines}\n"


# A run as a plain indexed Job of Kubernetes (1.31 and later), with the headless Service that names its pods.


JOB_CONTAINER = "cuboid"


def job_manifest(job: Job, options: PodOptions, written_by: str) -> str:
    """The whole file: run file, network policy, Service, Job."""
    job = in_pods(job)
    many = [network_policy(job, options), _service(job, options)] if job.nodes > 1 else []
    return _head(job, options, written_by) + "---\n".join([configuration(job, options), *many, _job(job, options)])


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
{indent(failure_policy(JOB_CONTAINER), "  ")}
  template:
    metadata:
      labels: {labels(job)}
    spec:
{indent(pod_spec(job, options, JOB_CONTAINER, host, subdomain), "      ")}
"""


# A run as a TrainJob of Kubeflow Trainer (2.2 and later), with the TrainingRuntime it refers to.


TRAIN_JOB_CONTAINER = "node"
"""The name Kubeflow gives the trainer's replicated job and its container."""


def train_job_manifest(job: Job, options: PodOptions, written_by: str) -> str:
    """The whole file: run file, network policy, TrainingRuntime, TrainJob."""
    job = in_pods(job)
    policy = [network_policy(job, options)] if job.nodes > 1 else []
    parts = [configuration(job, options), *policy, _runtime(job, options), _train_job(job, options)]
    return _head(job, options, written_by) + "---\n".join(parts)


def _runtime(job: Job, options: PodOptions) -> str:
    # JobSet names the pods of its headless service by job, replica and index.
    host = f"{job.name}-{TRAIN_JOB_CONTAINER}-0-0.{job.name}"
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
        - name: {TRAIN_JOB_CONTAINER}
          template:
            metadata:
              labels: {{trainer.kubeflow.org/trainjob-ancestor-step: trainer}}
            spec:
              backoffLimit: 0
{indent(failure_policy(TRAIN_JOB_CONTAINER), " " * 14)}
              template:
                metadata:
                  labels: {labels(job)}
                spec:
{indent(pod_spec(job, options, TRAIN_JOB_CONTAINER, host), " " * 18)}
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

"""`inv doctor --target aws`: what can be known before spending, each line with its remedy. It changes nothing."""

import importlib.metadata
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
from botocore.exceptions import ConnectionError as NoConnectionError
from dotenv import dotenv_values
from pydantic import ConfigDict

import settings
from cluster import submission
from cluster.aws import aws_errors, secrets_manager, vpc
from cluster.aws.capacity import possible_nodes
from cluster.common import instances, prices
from cluster.common.cluster_file import PINS, TARGET, ClusterFile, NodeType
from cluster.node.watchdog_head import LimitsSection
from cluster.target import Finding
from pipeline.ray_support import capacity
from pipeline.training.options import DDPOptions

AGAIN = f"try again: inv doctor --target {TARGET}"
SERVICES = ("sts", "iam", "ec2", "service-quotas", "ssm", "secretsmanager")

# What `inv up` and `inv down` ask of AWS: themselves, by CloudFormation and by Ray's launcher, each under the resource
# that it is asked for. What EC2 knows no resource for, or several kinds at once, stands under "*".
ACTIONS = {
    "*": "ec2:DescribeInstances ec2:DescribeInstanceTypes ec2:DescribeInstanceTypeOfferings "
    "ec2:DescribeSpotPriceHistory ec2:DescribeVpcs ec2:DescribeSubnets ec2:DescribeSecurityGroups "
    "ec2:DescribeKeyPairs ec2:DescribeVolumes ec2:DescribeLaunchTemplates ec2:DescribeLaunchTemplateVersions "
    "ec2:DescribeNetworkInterfaces ec2:DescribeSpotInstanceRequests ec2:CancelSpotInstanceRequests ec2:DeleteVolume "
    "ec2:DeleteNetworkInterface ec2:ImportKeyPair ec2:DeleteKeyPair ec2:CreateSecurityGroup ec2:DeleteSecurityGroup "
    "ec2:AuthorizeSecurityGroupIngress ec2:RevokeSecurityGroupIngress ec2:CreateLaunchTemplate "
    "ec2:CreateLaunchTemplateVersion ec2:DeleteLaunchTemplate pricing:GetProducts secretsmanager:ListSecrets",
    "arn:{partition}:ec2:{region}:{account}:instance/*": "ec2:RunInstances ec2:CreateTags ec2:TerminateInstances",
    "arn:{partition}:cloudformation:{region}:{account}:stack/{slug}/*": "cloudformation:CreateStack "
    "cloudformation:UpdateStack cloudformation:DeleteStack cloudformation:DescribeStacks "
    "cloudformation:DescribeStackEvents",
    "arn:{partition}:s3:::{slug}-{account}-{region}": "s3:CreateBucket s3:ListBucket s3:PutEncryptionConfiguration "
    "s3:PutBucketPublicAccessBlock s3:PutBucketTagging",
    "arn:{partition}:secretsmanager:{region}:{account}:secret:{slug}/*": "secretsmanager:CreateSecret "
    "secretsmanager:TagResource secretsmanager:GetSecretValue secretsmanager:PutSecretValue "
    "secretsmanager:DeleteSecret",
    "arn:{partition}:iam::{account}:role/{slug}-head": "iam:CreateRole iam:GetRole iam:TagRole iam:DeleteRole "
    "iam:PutRolePolicy iam:GetRolePolicy iam:DeleteRolePolicy iam:PassRole",
    "arn:{partition}:iam::{account}:instance-profile/{slug}-head": "iam:CreateInstanceProfile iam:GetInstanceProfile "
    "iam:AddRoleToInstanceProfile iam:RemoveRoleFromInstanceProfile iam:DeleteInstanceProfile",
}
UP_AND_DOWN = " ".join(ACTIONS.values()).split()
# What the load balancer takes besides, where [cluster.network] of settings.toml names a certificate.
HTTPS = {
    "*": "elasticloadbalancing:CreateLoadBalancer elasticloadbalancing:DeleteLoadBalancer "
    "elasticloadbalancing:DescribeLoadBalancers elasticloadbalancing:ModifyLoadBalancerAttributes "
    "elasticloadbalancing:CreateTargetGroup elasticloadbalancing:DeleteTargetGroup "
    "elasticloadbalancing:DescribeTargetGroups elasticloadbalancing:RegisterTargets "
    "elasticloadbalancing:CreateListener elasticloadbalancing:DeleteListener "
    "elasticloadbalancing:DescribeListeners elasticloadbalancing:AddTags",
}
# What the checks below ask beside that; who lacks one of these is told when it is asked.
OWN = [
    "iam:SimulatePrincipalPolicy",
    "servicequotas:GetServiceQuota",
    "ssm:GetParameters",
    "ec2:DescribeImages",
    "secretsmanager:DescribeSecret",
]

F = TypeVar("F", bound=ClusterFile)


@dataclass(frozen=True)
class Account(ClusterFile):
    """The cluster file with who asks AWS about it, and clients made once: threads may share them, but not make them."""

    arn: str
    """Of the caller."""
    clients: dict[str, Any]

    def client(self, service: str) -> Any:
        return self.clients[service]


class Quota(NamedTuple):
    """One of EC2's limits, in vCPUs of the machines that run at the same time."""

    code: str
    types: str
    """How the counted instance types begin, as a regular expression."""
    market: str

    def counts(self, instance_type: str, market: str) -> bool:
        return self.market == market and re.match(self.types, instance_type) is not None


QUOTAS = (
    Quota("L-417A185B", r"p\d", "on-demand"),
    Quota("L-7212CCBC", r"p[234]", "spot"),  # later P types have quotas of their own
    Quota("L-1216C47A", r"[acdhimrtz]\d", "on-demand"),
    Quota("L-34B43A08", r"[acdhimrtz]\d", "spot"),
)


class JobsSection(settings.Section):
    """What of [preprocess] and [serve] is checked here; the jobs' own options take seconds to import."""

    model_config = ConfigDict(extra="ignore")
    input: str
    mix: tuple[str, ...] = ()
    output: str
    shared_paths: tuple[str, ...] = ()
    min_replicas: int
    max_replicas: int
    tensor_parallel_size: int
    pipeline_parallel_size: int


def checks(file: ClusterFile) -> list[Finding]:
    """Everything that `inv up --target aws` needs, and the jobs after it."""
    try:
        return _checks(file)
    finally:
        boto3.setup_default_session()  # what comes after may be slow, and is tried again


def _checks(file: ClusterFile) -> list[Finding]:
    try:
        account = _sign_in(file)
    except settings.UserError as refusal:
        unknown = Finding("wrong", f"{refusal}; until then these are not checked: {', '.join(ASKED_OF_AWS)}")
        return [unknown, *_all(HERE, file)]
    with ThreadPoolExecutor(len(ASKED_OF_AWS)) as pool:  # AWS answers slowly, but many at once no slower
        asked = [pool.submit(list, _findings(subject, check, account)) for subject, check in ASKED_OF_AWS.items()]
        here = [*_all(HERE, account), *_findings("GPUs", _gpus, account)]
    known = Finding("ok", f"AWS knows you as {account.arn}")
    return [known, *(finding for future in asked for finding in future.result()), *here]


def _sign_in(file: ClusterFile) -> Account:
    """Who asks. Raises `settings.UserError` when AWS is not reached, or does not know."""
    try:
        # This process's clients give up soon: a report that waits minutes for a dead network helps nobody.
        session = botocore.session.get_session()
        session.set_default_client_config(Config(connect_timeout=3, read_timeout=5, retries={"total_max_attempts": 2}))
        boto3.setup_default_session(botocore_session=session)
        clients = {service: file.client(service) for service in SERVICES}
        arn = clients["sts"].get_caller_identity()["Arn"]
    except (NoConnectionError, HTTPClientError) as error:
        raise settings.UserError(
            f"AWS is not reached from here ({error}): mend the network, HTTPS_PROXY, or region in cluster/cluster.yaml"
        ) from None
    except (BotoCoreError, ClientError) as error:
        raise settings.UserError(
            f"no AWS credentials that work ({error}): run aws configure, or aws sso login where you have that, or set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from None
    return Account(file.content, file.digest, arn, clients)


def _all(checks: dict[str, Callable[[F], Iterator[Finding]]], file: F) -> list[Finding]:
    return [finding for subject, check in checks.items() for finding in _findings(subject, check, file)]


def _findings(subject: str, check: Callable[[F], Iterator[Finding]], file: F) -> Iterator[Finding]:
    """What a check finds; what stops it is a finding too."""
    try:
        yield from check(file)
    except settings.UserError as refusal:
        yield Finding("wrong", str(refusal))
    except ClientError as error:
        if aws_errors.missing_permission(error):
            remedy = f"have {_denied_action(error)} allowed for you in IAM, then {AGAIN}"
            yield Finding("wrong", f"{subject}: not checked, as AWS denies it; {remedy}")
        else:
            yield Finding("note", f"{subject}: not checked, as AWS says: {error}; {AGAIN}")
    except BotoCoreError as error:
        yield Finding("note", f"{subject}: not checked, as AWS does not answer ({error}); {AGAIN}")


def _judge(good: bool, text: str, remedy: str, otherwise: str = "wrong") -> Finding:
    return Finding("ok", text) if good else Finding(otherwise, f"{text}; {remedy}")


def _denied_action(error: ClientError) -> str:
    """The IAM action that was refused: most services' messages name it, EC2's not always."""
    named = aws_errors.missing_permission(error)
    return next((one for one in UP_AND_DOWN + OWN if one.endswith(f":{named}")), named)


# ---------------------------------------------------------------- what only AWS knows


def _permissions(account: Account) -> Iterator[Finding]:
    """As IAM decides; where the caller may not ask IAM, as EC2 does for the calls that cost money."""
    if account.arn.endswith(":root"):
        text = "you are the account's root user, who may do everything"
        yield Finding("note", f"{text}; make a user for daily work: aws iam create-user --user-name NAME")
        return
    try:
        missing = _simulate(account)
    except ClientError as error:
        tried = list(_dry_runs(account))
        yield from tried
        rest = f"of what inv up and inv down take, {len(UP_AND_DOWN) - len(tried)} other actions are not checked"
        why = (
            f"have {_denied_action(error)} allowed for you in IAM"
            if aws_errors.missing_permission(error)
            else f"IAM says: {error}"
        )
        yield Finding("note", f"{rest}; {why}, then {AGAIN}")
        return
    yield _judge(
        not missing,
        f"you may do {len(UP_AND_DOWN) - len(missing)} of the {len(UP_AND_DOWN)} IAM actions of inv up and inv down",
        f"add the others to the policy of {account.arn}: {', '.join(missing)}",
    )


def _has_https() -> bool:
    return bool(settings.load(vpc.NetworkSection, "network", profile="cluster").certificate)


def _simulate(account: Account) -> list[str]:
    """The actions that the caller's policies do not allow."""
    iam = account.client("iam")
    _, partition, _, _, number, name = account.arn.split(":", 5)
    source = account.arn
    if name.startswith("assumed-role/"):  # the policies are the role's, whose whole path only IAM knows
        source = iam.get_role(RoleName=name.split("/")[1])["Role"]["Arn"]
    context = {  # what the calls carry, for policies with conditions
        "aws:RequestedRegion": account.region,
        "aws:RequestTag/ray-project": account.slug,
        "aws:ResourceTag/ray-project": account.slug,
        "ec2:CreateAction": "RunInstances",
        "iam:PassedToService": "ec2.amazonaws.com",
    }
    names = {"partition": partition, "region": account.region, "account": number, "slug": account.slug}
    return [
        result["EvalActionName"]
        for resource, actions in [*ACTIONS.items(), *(HTTPS.items() if _has_https() else [])]
        for page in iam.get_paginator("simulate_principal_policy").paginate(
            PolicySourceArn=source,
            ActionNames=actions.split(),
            ResourceArns=[resource.format(**names)],
            ContextEntries=[
                {"ContextKeyName": key, "ContextKeyValues": [value], "ContextKeyType": "string"}
                for key, value in context.items()
            ],
        )
        for result in page["EvaluationResults"]
        if result["EvalDecision"] != "allowed"
    ]


def _dry_runs(account: Account) -> Iterator[Finding]:
    """Starting the head and ending what runs: EC2 says whether it would, and does not."""
    ec2, head = account.client("ec2"), account.head.node_config
    launch = {key: head[key] for key in ("ImageId", "InstanceType", "TagSpecifications") if key in head}
    tries = {"ec2:RunInstances": partial(ec2.run_instances, **launch, MinCount=1, MaxCount=1, DryRun=True)}
    if ids := [machine.id for machine in instances.living(account)]:
        tries["ec2:TerminateInstances"] = partial(ec2.terminate_instances, InstanceIds=ids, DryRun=True)
    for action, try_it in tries.items():
        try:
            try_it()
        except ClientError as error:
            if error.response["Error"]["Code"] == "DryRunOperation":  # "would have succeeded"
                yield Finding("ok", f"you may do {action}")
            elif aws_errors.missing_permission(error):
                yield Finding("wrong", f"you may not do {action}; add it to the policy of {account.arn}")
            else:
                yield Finding("note", f"whether you may do {action} is not known, as AWS says: {error}; {AGAIN}")


def _quotas(account: Account) -> Iterator[Finding]:
    """vCPUs that cluster.yaml may take, against what AWS grants and what other machines have of it."""
    planned = [account.head, *account.workers]
    others = list(_running_elsewhere(account))
    types = {one.instance_type for one in planned} | {instance_type for instance_type, _ in others}
    described = account.client("ec2").describe_instance_types(InstanceTypes=sorted(types))["InstanceTypes"]
    vcpus = {one["InstanceType"]: one["VCpuInfo"]["DefaultVCpus"] for one in described}
    for quota in QUOTAS:
        used = sum(vcpus[instance_type] for instance_type, market in others if quota.counts(instance_type, market))
        if counted := [one for one in planned if quota.counts(one.instance_type, one.market)]:
            yield _quota(account, quota, counted, vcpus, used)


def _running_elsewhere(account: Account) -> Iterator[tuple[str, str]]:
    """Type and market of each machine that the quotas count and that is not this cluster's."""
    running = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
    for page in account.client("ec2").get_paginator("describe_instances").paginate(Filters=running):
        for instance in (one for reservation in page["Reservations"] for one in reservation["Instances"]):
            found = instance["InstanceType"], instance.get("InstanceLifecycle") or "on-demand"
            own = {"Key": "ray-project", "Value": account.slug} in instance.get("Tags", [])
            if not own and any(quota.counts(*found) for quota in QUOTAS):
                yield found


def _quota(account: Account, quota: Quota, counted: list[NodeType], vcpus: dict[str, int], used: int) -> Finding:
    workers = [one for one in counted if one != account.head]
    most = min(sum(one.most for one in workers), account.most_workers)
    needed = most * max((vcpus[one.instance_type] for one in workers), default=0)
    needed += vcpus[account.head.instance_type] if account.head in counted else 0
    answer = account.client("service-quotas").get_service_quota(ServiceCode="ec2", QuotaCode=quota.code)["Quota"]
    free = answer["Value"] - used
    return _judge(
        needed <= free,
        f"{answer['QuotaName']} ({quota.code}): {needed} vCPUs needed, {answer['Value']:g} applied, {used} used by "
        "other machines",
        "ask for more, which takes hours or days: aws service-quotas request-service-quota-increase --service-code ec2 "
        f"--quota-code {quota.code} --desired-value {needed + used} --region {account.region}",
        "note" if free >= max(vcpus[one.instance_type] for one in counted) else "wrong",  # some machines come, or none
    )


def _spot_role(account: Account) -> Iterator[Finding]:
    """An account that never used spot lacks this role, and the head may not make it."""
    if all(worker.market != "spot" for worker in account.workers):
        return
    iam = account.client("iam")
    try:
        iam.get_role(RoleName="AWSServiceRoleForEC2Spot")
    except iam.exceptions.NoSuchEntityException:
        remedy = "run once for all: aws iam create-service-linked-role --aws-service-name spot.amazonaws.com"
        yield Finding("wrong", f"this account never used spot machines, and the head may not begin; {remedy}")
    else:
        yield Finding("ok", "this account may use spot machines")


def _zones(account: Account) -> Iterator[Finding]:
    types = sorted({one.instance_type for one in (account.head, *account.workers)})
    offers = account.client("ec2").describe_instance_type_offerings(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": types}]
    )["InstanceTypeOfferings"]
    for instance_type in types:
        zones = sorted(offer["Location"] for offer in offers if offer["InstanceType"] == instance_type)
        text = f"{instance_type} is offered in {', '.join(zones) or f'no zone of {account.region}'}"
        yield _judge(bool(zones), text, "set another InstanceType, or region, in cluster/cluster.yaml")


def _subnets(account: Account) -> Iterator[Finding]:
    network = vpc.find_network(account, settings.load(vpc.NetworkSection, "network", profile="cluster").vpc)
    subnets = account.client("ec2").describe_subnets(SubnetIds=sorted(set(network.subnets)))["Subnets"]
    most = account.most_workers + 1  # all workers may come into one zone, the head's
    for subnet in sorted(subnets, key=lambda subnet: subnet["AvailabilityZone"]):
        free, zone = subnet["AvailableIpAddressCount"], subnet["AvailabilityZone"]
        yield _judge(
            free >= most,
            f"subnet {subnet['SubnetId']} in {zone}: addresses free {free}, taken by the cluster up to {most}",
            f"make a larger one: aws ec2 create-subnet --vpc-id {network.vpc} --availability-zone {zone} --cidr-block "
            f"A.B.C.D/24 --region {account.region}   or set vpc in [cluster.network] of settings.toml",
        )


def _images(account: Account) -> Iterator[Finding]:
    for image in sorted({one.node_config.get("ImageId", "") for one in (account.head, *account.workers)} - {""}):
        if image.startswith("resolve:ssm:"):
            parameters = account.client("ssm").get_parameters(Names=[image.removeprefix("resolve:ssm:")])["Parameters"]
            found = [parameter["Value"] for parameter in parameters]
            browse = "aws ssm get-parameters-by-path --recursive --path /aws/service/deeplearning/ami"
        else:
            only = [{"Name": "image-id", "Values": [image]}]
            found = [one["ImageId"] for one in account.client("ec2").describe_images(Filters=only)["Images"]]
            browse = "aws ec2 describe-images --owners amazon"
        yield _judge(
            bool(found),
            f"ImageId {image} is {found[0] if found else 'no image'} in {account.region}",
            f"set another in cluster/cluster.yaml, from: {browse} --region {account.region}",
        )


def _secrets(account: Account) -> Iterator[Finding]:
    """Whether jobs will find them; their values are not asked for."""
    client = account.client("secretsmanager")
    env_file = settings.PROJECT / ".env"
    values = dotenv_values(env_file) if env_file.is_file() else {}
    for name in settings.load(submission.SecretsSection, "secrets", profile="cluster").names:
        secret = f"{account.slug}/{name}"
        try:
            deleted = "DeletedDate" in client.describe_secret(SecretId=secret)
        except client.exceptions.ResourceNotFoundException:
            coming = bool(values.get(name)) or name == secrets_manager.SERVER_KEY  # which inv up makes up
            state = "is stored by inv up" if coming else "has no value, and jobs do without it"
            yield _judge(coming, f"the secret {secret} {state}", f"put {name}=... into .env", "note")
        else:
            state = "is being deleted, so that inv up fails" if deleted else "is in Secrets Manager"
            restore = f"aws secretsmanager restore-secret --secret-id {secret} --region {account.region}"
            yield _judge(not deleted, f"the secret {secret} {state}", f"keep it: {restore}")


def _prices(account: Account) -> Iterator[Finding]:
    known = prices.ask(account)
    idle = f"{known.head:.2f} dollars an hour while no work waits (the head, without disks and traffic)"
    yield Finding("ok", f"{idle}; with all {account.most_workers} workers all day {24 * known.most:.0f} dollars a day")


def _gpus(account: Account) -> Iterator[Finding]:
    """What jobs ask for, against the machines that there can ever be."""
    nodes = possible_nodes(account)
    train = settings.load(DDPOptions, "train", profile="cluster")
    with _cluster_of(nodes):
        each = {"CPU": train.cpus_per_worker} | ({"GPU": 1} if train.use_gpu else {})
        capacity.refuse_too_many_workers(train.min_workers, each)
    yield Finding("ok", f"[train]: the cluster has room for num_workers = {train.min_workers}")
    serve = settings.load(JobsSection, "preprocess", "serve", profile="cluster")
    room = sum(node["count"] * node["resources"].get("GPU", 0) for node in nodes)
    gpus = serve.tensor_parallel_size * serve.pipeline_parallel_size
    yield _judge(
        serve.max_replicas * gpus <= room,
        f"[serve]: max_replicas = {serve.max_replicas} takes {serve.max_replicas * gpus} GPUs, and the cluster can "
        f"have {room}",
        "lower max_replicas or tensor_parallel_size in [cluster.serve] of settings.toml, or raise max_workers in "
        "cluster/cluster.yaml",
        "wrong" if max(1, serve.min_replicas) * gpus > room else "note",
    )


# ---------------------------------------------------------------- what this machine knows


def _versions(file: ClusterFile) -> Iterator[Finding]:
    """Ray and Python of this machine against those that the nodes install."""
    ray = re.search(r"^ray(?:\[.*\])?==(\S+)", PINS.read_text(encoding="utf-8"), re.MULTILINE)
    python = re.search(r"uv venv .*--python (\S+)", "\n".join(file.content["setup_commands"]))
    minor = ".".join(platform.python_version_tuple()[:2])
    for name, here, pin in (("Ray", importlib.metadata.version("ray"), ray), ("Python", minor, python)):
        there = pin[1] if pin else "not pinned"
        remedy = f"jobs need the same; run: rm -r .venv && inv doctor --target {TARGET}"
        yield _judge(here == there, f"{name}: {here} here, {there} on the cluster", remedy)


def _tools(file: ClusterFile) -> Iterator[Finding]:
    """What Ray's launcher and the verbs run."""
    for tool, package in (("ssh", "openssh-client"), ("ssh-keygen", "openssh-client"), ("rsync", "rsync")):
        path = shutil.which(tool)
        remedy = f"run: apt-get install {package} (or your system's way)"
        yield _judge(path is not None, f"{tool}: {path or 'not on this machine'}", remedy)


def _upload(file: ClusterFile) -> Iterator[Finding]:
    most = settings.load(submission.UploadSection, "ray", profile="cluster").working_dir_mib
    submission.check_size(most)
    yield Finding("ok", f"the project's folder is within the {most} MiB that a job may upload")


def _paths(file: ClusterFile) -> Iterator[Finding]:
    """Relative paths are in the project's bucket, and so everywhere."""
    train = settings.load(DDPOptions, "train", profile="cluster")
    rows = settings.load(JobsSection, "preprocess", "serve", profile="cluster")
    with _cluster_of([{"resources": {}, "count": file.most_workers}]):
        paths = {"model": train.model, "data": train.data, "output": train.output}
        capacity.refuse_private_paths(paths, train.shared_paths, "train")
        mixed = (("mix", part.rpartition("=")[0]) for part in rows.mix)
        for setting, path in (("input", rows.input), *mixed, ("output", rows.output)):
            capacity.refuse_private_paths({setting: path}, rows.shared_paths, "preprocess")
    yield Finding("ok", "the paths in settings.toml can be read by all nodes")


def _limits(file: ClusterFile) -> Iterator[Finding]:
    limits = settings.load(LimitsSection, "limits", profile="cluster")
    yield Finding("ok", f"the cluster ends itself after {limits.hours:g} hours or {limits.dollars:g} dollars")


@contextmanager
def _cluster_of(nodes: list[dict[str, Any]]) -> Iterator[None]:
    """pipeline/ray_support/capacity.py reads the environment, as a submitted job has it."""
    os.environ["CLUSTER_NODES"] = json.dumps(nodes)
    try:
        yield
    finally:
        del os.environ["CLUSTER_NODES"]


ASKED_OF_AWS: dict[str, Callable[[Account], Iterator[Finding]]] = {
    "permissions": _permissions,
    "quotas": _quotas,
    "spot": _spot_role,
    "zones": _zones,
    "subnets": _subnets,
    "images": _images,
    "secrets": _secrets,
    "prices": _prices,
}
HERE: dict[str, Callable[[ClusterFile], Iterator[Finding]]] = {
    "versions": _versions,
    "tools": _tools,
    "upload": _upload,
    "paths": _paths,
    "limits": _limits,
}

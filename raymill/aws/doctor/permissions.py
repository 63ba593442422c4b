"""Check whether the caller has all permissions for `inv up` and `inv down`."""

from collections.abc import Iterator, Sequence
from functools import partial

from botocore.exceptions import ClientError

from raymill import settings
from raymill.aws import aws_errors, reservation, stack, stack_sections
from raymill.aws.doctor.account import Account, denied_action, retry
from raymill.common import bucket, instances
from raymill.doctor import Finding, judge
from raymill.ray_support.aws_sections import NetworkSection

GUARD_ROLE = "arn:{partition}:iam::{account}:role/{slug}-{region}-guard"
GUARD_CALLER_ROLE = f"{GUARD_ROLE}-caller"
HEAD_ROLE = "arn:{partition}:iam::{account}:role/{slug}-{region}-head"
BALANCING = "elasticloadbalancing.amazonaws.com"
BALANCING_ROLE = "AWSServiceRoleForElasticLoadBalancing"
BALANCING_ARN = f"arn:{{partition}}:iam::{{account}}:role/aws-service-role/{BALANCING}/{BALANCING_ROLE}"
EC2 = "ec2.amazonaws.com"
# The services to which roles are passed. The other roles are passed to EC2.
PASSED_TO = {GUARD_ROLE: "lambda.amazonaws.com", GUARD_CALLER_ROLE: "scheduler.amazonaws.com"}
# Actions that `inv up` and `inv down` need, including those of CloudFormation and Ray's launcher, by resource.
# Actions without a resource, or with several kinds of resources, are under "*".
ACTIONS = {
    "*": "ec2:DescribeInstances ec2:DescribeInstanceTypes ec2:DescribeInstanceTypeOfferings "
    "ec2:DescribeSpotPriceHistory ec2:DescribeVpcs ec2:DescribeSubnets ec2:DescribeSecurityGroups "
    "ec2:DescribeSecurityGroupRules "
    "ec2:DescribeKeyPairs ec2:DescribeVolumes ec2:DescribeLaunchTemplates ec2:DescribeLaunchTemplateVersions "
    "ec2:DescribeNetworkInterfaces ec2:DescribeSpotInstanceRequests ec2:CancelSpotInstanceRequests ec2:DeleteVolume "
    "ec2:DeleteNetworkInterface ec2:ImportKeyPair ec2:DeleteKeyPair ec2:CreateSecurityGroup ec2:DeleteSecurityGroup "
    "ec2:AuthorizeSecurityGroupIngress ec2:RevokeSecurityGroupIngress ec2:AuthorizeSecurityGroupEgress "
    "ec2:RevokeSecurityGroupEgress ec2:CreateLaunchTemplate ec2:CreateLaunchTemplateVersion ec2:DeleteLaunchTemplate "
    "ec2:CreatePlacementGroup ec2:DescribePlacementGroups ec2:DeletePlacementGroup ec2:DescribeNatGateways "
    "ec2:DescribeAddresses ec2:DescribeRouteTables pricing:GetProducts "
    "ssm:GetParameters secretsmanager:ListSecrets",
    "arn:{partition}:ec2:{region}:{account}:instance/*": "ec2:RunInstances ec2:CreateTags ec2:TerminateInstances",
    "arn:{partition}:cloudformation:{region}:{account}:stack/{slug}/*": "cloudformation:CreateStack "
    "cloudformation:UpdateStack cloudformation:DeleteStack cloudformation:DescribeStacks "
    "cloudformation:DescribeStackEvents cloudformation:ContinueUpdateRollback",
    "arn:{partition}:ec2:{region}:{account}:security-group/*": "ec2:CreateTags",
    "arn:{partition}:s3:::{bucket}": "s3:ListBucket",
    "arn:{partition}:secretsmanager:{region}:{account}:secret:{slug}/*": "secretsmanager:CreateSecret "
    "secretsmanager:DescribeSecret secretsmanager:TagResource secretsmanager:GetSecretValue "
    "secretsmanager:PutSecretValue secretsmanager:UpdateSecretVersionStage "
    "secretsmanager:DeleteSecret",
    "arn:{partition}:lambda:{region}:{account}:function:{slug}-guard": "lambda:CreateFunction lambda:GetFunction "
    "lambda:UpdateFunctionCode lambda:UpdateFunctionConfiguration lambda:DeleteFunction lambda:TagResource",
    "arn:{partition}:scheduler:{region}:{account}:schedule/default/{slug}-guard": "scheduler:CreateSchedule "
    "scheduler:GetSchedule scheduler:UpdateSchedule scheduler:DeleteSchedule",
    HEAD_ROLE: "iam:CreateRole iam:GetRole iam:TagRole iam:DeleteRole iam:PutRolePolicy iam:GetRolePolicy "
    "iam:DeleteRolePolicy iam:ListRolePolicies iam:ListAttachedRolePolicies iam:PassRole",
    GUARD_ROLE: "iam:PassRole",
    GUARD_CALLER_ROLE: "iam:PassRole",
    "arn:{partition}:iam::{account}:instance-profile/{slug}-{region}-head": "iam:CreateInstanceProfile "
    "iam:GetInstanceProfile iam:AddRoleToInstanceProfile iam:RemoveRoleFromInstanceProfile iam:DeleteInstanceProfile",
}
UP_AND_DOWN = " ".join(ACTIONS.values()).split()
# Additional actions for the project's bucket, unless [cluster.storage] of settings.toml names yours.
BUCKET_ACTIONS = {
    "arn:{partition}:s3:::{bucket}": "s3:CreateBucket s3:PutEncryptionConfiguration s3:PutBucketPublicAccessBlock "
    "s3:PutBucketTagging s3:GetLifecycleConfiguration s3:PutLifecycleConfiguration",
}
# Additional actions for the stack's own VPC, unless [cluster.network] of settings.toml names subnets.
VPC_ACTIONS = {
    "*": "ec2:CreateVpc ec2:ModifyVpcAttribute ec2:DeleteVpc ec2:DescribeVpcAttribute ec2:CreateSubnet "
    "ec2:DeleteSubnet ec2:CreateInternetGateway ec2:AttachInternetGateway ec2:DetachInternetGateway "
    "ec2:DeleteInternetGateway ec2:DescribeInternetGateways ec2:CreateRouteTable ec2:DeleteRouteTable "
    "ec2:AssociateRouteTable ec2:ReplaceRouteTableAssociation "
    "ec2:DisassociateRouteTable ec2:CreateRoute ec2:DeleteRoute ec2:CreateVpcEndpoint "
    "ec2:DescribeVpcEndpoints ec2:DeleteVpcEndpoints",
}
# Additional actions for the NAT gateway of that VPC, if workers are private.
NAT_ACTIONS = {"*": "ec2:AllocateAddress ec2:ReleaseAddress ec2:CreateNatGateway ec2:DeleteNatGateway"}
# Additional actions for the load balancer, if [cluster.network] of settings.toml names a certificate.
HTTPS_ACTIONS = {
    "*": "elasticloadbalancing:CreateLoadBalancer elasticloadbalancing:DeleteLoadBalancer "
    "elasticloadbalancing:DescribeLoadBalancers elasticloadbalancing:ModifyLoadBalancerAttributes "
    "elasticloadbalancing:CreateTargetGroup elasticloadbalancing:DeleteTargetGroup "
    "elasticloadbalancing:DescribeTargetGroups elasticloadbalancing:RegisterTargets "
    "elasticloadbalancing:CreateListener elasticloadbalancing:ModifyListener elasticloadbalancing:DeleteListener "
    "elasticloadbalancing:DescribeListeners elasticloadbalancing:SetSubnets elasticloadbalancing:AddTags",
}
# Additional action for the first load balancer of an account.
BALANCING_ACTIONS = {BALANCING_ARN: "iam:CreateServiceLinkedRole"}
# Additional actions if [cluster.iam] of settings.toml names a permissions boundary, or no longer names one.
BOUNDARY_ACTIONS = {HEAD_ROLE: "iam:PutRolePermissionsBoundary"}
NO_BOUNDARY_ACTIONS = {HEAD_ROLE: "iam:DeleteRolePermissionsBoundary"}
# Additional actions for the budget, if [cluster.budget] of settings.toml has one.
BUDGET_ACTIONS = {"*": "budgets:ModifyBudget budgets:ViewBudget budgets:TagResource budgets:ListTagsForResource"}
# Additional actions if [cluster.capacity] of settings.toml names a reservation.
RESERVATION_ACTIONS = {"*": "ec2:DescribeCapacityReservations"}
# Actions with which inv down names reservations that still cost money, and clusters in other regions. Without them, it
# says what it does not know.
OPTIONAL_ACTIONS = {"*": "ec2:DescribeCapacityReservations iam:ListRoles"}
# Actions that only the doctor needs. If AWS denies one, the report of the failed check names it.
DOCTOR_ACTIONS = [
    "iam:SimulatePrincipalPolicy",
    "servicequotas:GetServiceQuota",
    "ec2:DescribeImages",
    "ec2:GetEbsDefaultKmsKeyId",
]
KNOWN_ACTIONS = [*UP_AND_DOWN, *DOCTOR_ACTIONS]


def check(account: Account) -> Iterator[Finding]:
    """Ask IAM which permissions the caller has.

    If IAM rejects this request, make dry runs of the EC2 calls that start and terminate instances.
    """
    if account.arn.endswith(":root"):
        text = "you are the account's root user, who has all permissions"
        yield Finding("warning", f"{text}. Create a user for daily work: aws iam create-user --user-name NAME")
        return
    try:
        missing = _simulate(account, _needed_actions(account))
        unknown = _simulate(account, [*OPTIONAL_ACTIONS.items()])
    except ClientError as error:
        tried = list(_dry_runs(account))
        yield from tried
        rest = f"{_needed_count(account) - len(tried)} other actions of inv up and inv down are not checked"
        why = (
            aws_errors.denial(error) or f"Ask for the permission {denied_action(error, KNOWN_ACTIONS)}"
            if aws_errors.missing_permission(error)
            else f"IAM says: {error}"
        )
        yield Finding("warning", f"{rest}. {why}. {retry()}")
        return
    needed = _needed_count(account)
    remedy = f"Add the others to the policy of {account.arn}: {', '.join(dict.fromkeys(missing))}"
    if "iam:CreateRole" in missing and not stack_sections.boundary():
        remedy += (
            ". If your company requires a permissions boundary for roles, set permissions_boundary in [cluster.iam] of "
            "settings.toml"
        )
    yield judge(
        not missing, f"you have {needed - len(missing)} of the {needed} permissions for inv up and inv down", remedy
    )
    if unknown:
        text = f"without {' and '.join(unknown)}, reservations or clusters elsewhere that cost money stay unnamed"
        yield Finding("warning", f"{text}. Add them to the policy of {account.arn}")


def _needed_actions(account: Account) -> list[tuple[str, str]]:
    """Return the needed actions by resource, including those for what settings.toml asks for."""
    section = settings.load(NetworkSection, "network", profile="cluster")
    makes_vpc = not section.subnets
    return [
        *ACTIONS.items(),
        *([] if bucket.users_own() else BUCKET_ACTIONS.items()),
        *(VPC_ACTIONS.items() if makes_vpc else []),
        *(NAT_ACTIONS.items() if makes_vpc and section.private else []),
        *(HTTPS_ACTIONS.items() if section.certificate else []),
        *(BALANCING_ACTIONS.items() if section.certificate and _lacks_balancing_role(account) else []),
        *(BOUNDARY_ACTIONS.items() if stack_sections.boundary() else []),
        *(
            NO_BOUNDARY_ACTIONS.items()
            if not stack_sections.boundary() and stack.parameters(account).get("Boundary")
            else []
        ),
        *(BUDGET_ACTIONS.items() if stack_sections.budget_parameters() else []),
        *(RESERVATION_ACTIONS.items() if reservation.load_section().reservation else []),
    ]


def _needed_count(account: Account) -> int:
    return sum(len(actions.split()) for _, actions in _needed_actions(account))


def _lacks_balancing_role(account: Account) -> bool:
    """Return whether the account has never had a load balancer, as far as the caller may know."""
    try:
        account.client("iam").get_role(RoleName=BALANCING_ROLE)
    except ClientError as error:
        return aws_errors.is_missing(error)
    return False


def _simulate(account: Account, needed: Sequence[tuple[str, str]]) -> list[str]:
    """Return those of the needed actions, given by resource, that the caller's policies do not allow."""
    iam = account.client("iam")
    _, partition, _, _, number, name = account.arn.split(":", 5)
    source = account.arn
    if name.startswith("assumed-role/"):  # the policies belong to the role, and only IAM knows the role's full path
        source = iam.get_role(RoleName=name.split("/")[1])["Role"]["Arn"]
    context = {  # values of the condition keys that policies may use
        "aws:RequestedRegion": account.region,
        "aws:RequestTag/ray-project": account.slug,
        "aws:ResourceTag/ray-project": account.slug,
        "ec2:CreateAction": "RunInstances",
        "iam:AWSServiceName": BALANCING,
    }
    if limit := stack_sections.boundary():
        context["iam:PermissionsBoundary"] = limit
    names = {"partition": partition, "region": account.region, "account": number, "slug": account.slug}
    names["bucket"] = bucket.name(account)
    return [
        result["EvalActionName"]
        for resource, actions in needed
        for page in iam.get_paginator("simulate_principal_policy").paginate(
            PolicySourceArn=source,
            ActionNames=actions.split(),
            ResourceArns=[resource.format(**names)],
            ContextEntries=[
                {"ContextKeyName": key, "ContextKeyValues": [value], "ContextKeyType": "string"}
                for key, value in (*context.items(), ("iam:PassedToService", PASSED_TO.get(resource, EC2)))
            ],
        )
        for result in page["EvaluationResults"]
        if result["EvalDecision"] != "allowed"
    ]


def _dry_runs(account: Account) -> Iterator[Finding]:
    """Ask EC2 whether the caller may start the head and terminate the running instances. A dry run does neither."""
    ec2, head = account.client("ec2"), account.head.node_config
    launch = {key: head[key] for key in ("ImageId", "InstanceType", "TagSpecifications") if key in head}
    calls = {"ec2:RunInstances": partial(ec2.run_instances, **launch, MinCount=1, MaxCount=1, DryRun=True)}
    if ids := [instance.id for instance in instances.living(account)]:
        calls["ec2:TerminateInstances"] = partial(ec2.terminate_instances, InstanceIds=ids, DryRun=True)
    for action, call in calls.items():
        try:
            call()
        except ClientError as error:
            if error.response["Error"]["Code"] == "DryRunOperation":  # "would have succeeded"
                yield Finding("ok", f"you have the permission {action}")
            elif aws_errors.missing_permission(error):
                lacking = f"you lack the permission {action}. Add it to the policy of {account.arn}"
                yield Finding("error", aws_errors.denial(error) or lacking)
            else:
                said = f"the permission {action} is not checked, because AWS says: {error}. {retry()}"
                yield Finding("warning", said)

"""What the public registry of CloudFormation says about the resource types of cluster/stack.yaml.

The schemas come with cfn-lint. They say which properties force replacement, and which permissions of the caller
CloudFormation uses to create, update and delete a resource.
https://docs.aws.amazon.com/cloudformation-cli/latest/userguide/resource-type-schema.html
"""

import re
from typing import Any

from cfnlint.schema.manager import PROVIDER_SCHEMA_MANAGER

NAMES = ("BucketName", "Budget/BudgetName", "FunctionName", "GroupName", "InstanceProfileName", "LaunchTemplateName")
NAMES += ("Name", "RoleName")
"""Paths of the properties that name a resource."""
UNUSED = {
    "AWS::EC2::VPC": r"ec2:\w+EncryptionControls?|ec2:ModifyVpcTenancy",
    "AWS::EC2::VPCGatewayAttachment": r"ec2:\w+VpnGateways?",
    "AWS::EC2::Subnet": r"ec2:ModifySubnetAttribute|ec2:\w+SubnetCidrBlock",
    "AWS::EC2::VPCEndpoint": r"vpc-lattice:\w+|vpce:\w+|ec2:DescribeSecurityGroups",
    "AWS::EC2::EIP": r"ec2:AcceptAddressTransfer|ec2:\w+ssociateAddress",
    "AWS::EC2::NatGateway": r"ec2:\w+NatGatewayAddress",
    "AWS::EC2::SecurityGroup": r"ec2:UpdateSecurityGroupRuleDescriptions\w+",
    "AWS::Budgets::Budget": r"billing:\w+|budgets:UntagResource",
    "AWS::Lambda::Function": r"lambda:\w+(Concurrency|CodeSigningConfig|RuntimeManagementConfig|RecursionConfig"
    r"|ScalingConfig|CapacityProvider|LayerVersion|RuntimeAlias|PublishVersion)|lambda:(PublishVersion|UntagResource)"
    r"|(s3|s3files|elasticfilesystem|kms|ec2):\w+",
    "AWS::ElasticLoadBalancingV2::LoadBalancer": r"ec2:\w+|elasticloadbalancing:(ModifyCapacityReservation"
    r"|SetIpAddressType|ModifyIpPools|RemoveTags|SetSecurityGroups)",
    "AWS::ElasticLoadBalancingV2::TargetGroup": r"elasticloadbalancing:(RemoveTags|DeregisterTargets|RegisterTargets"
    r"|DescribeTargetHealth|Modify\w+)",
    "AWS::ElasticLoadBalancingV2::Listener": r"cognito-idp:\w+|elasticloadbalancing:(RemoveTags|\w+ListenerAttributes"
    r"|DescribeTags)",
    "AWS::S3::Bucket": r"s3tables:\w+|iam:\w+|s3:(?!CreateBucket$|PutBucketTagging$|PutEncryptionConfiguration$"
    r"|PutBucketPublicAccessBlock$)\w+",
    "AWS::IAM::Role": r"iam:(\w+RolePolicy|UntagRole|UpdateRole|UpdateRoleDescription|UpdateAssumeRolePolicy)",
    "AWS::IAM::Policy": r"iam:\w+(User|Group)Policy",
}
"""Permissions that the registry lists and that stack.yaml does not need, because it does not set the properties for
which CloudFormation uses them. Role policies are resources of their own there, and no tag is ever removed."""


def schema(kind: str) -> dict[str, Any]:
    """Return the schema of a resource type, such as "AWS::EC2::VPC"."""
    return PROVIDER_SCHEMA_MANAGER.get_resource_schema("us-east-1", kind).schema


def force_replacement(kind: str) -> list[str]:
    """Return the paths of the properties that force the replacement of a resource if they change."""
    return [path.removeprefix("/properties/") for path in schema(kind).get("createOnlyProperties", [])]


def actions(kind: str, handler: str) -> list[str]:
    """Return the actions that the caller must be allowed. `handler` is "create", "update" or "delete"."""
    listed = schema(kind)["handlers"].get(handler, {}).get("permissions", [])
    unused = re.compile(rf"{UNUSED.get(kind, '')}|ec2:DeleteTags")
    return sorted(action for action in listed if not unused.fullmatch(action))


def value(properties: dict[str, Any], path: str) -> Any:
    """Return the value of a property, or None if it is not set."""
    found: Any = properties
    for key in path.split("/"):
        found = found.get(key) if isinstance(found, dict) else None
    return found

"""The resources of CloudFormation stacks in the emulated cloud: those that moto lacks, and what none of them models.

moto answers CREATE_COMPLETE for types that it does not know, and ignores properties. Both would hide faults, so
`refuse_unmodeled` rejects a template with a type or property that is not listed here.

Importing this module replaces moto's classes for these types. stack_updates.py decides when a resource is updated,
replaced or deleted.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from moto.budgets.models import budgets_backends
from moto.cloudformation.parsing import get_model_map
from moto.core.common_models import CloudFormationModel
from moto.ec2.exceptions import DependencyViolationError
from moto.ec2.models import ec2_backends
from moto.ec2.models.security_groups import SecurityGroup as MotoSecurityGroup
from moto.elbv2.models import FakeListener, FakeLoadBalancer, FakeTargetGroup, elbv2_backends
from moto.iam.models import Role as MotoRole
from moto.s3.models import FakeBucket, s3_backends

from raymill.emulator.iam import AwsError

MODELED = {
    "AWS::EC2::VPC": "CidrBlock Tags",
    "AWS::EC2::InternetGateway": "Tags",
    "AWS::EC2::VPCGatewayAttachment": "VpcId InternetGatewayId",
    "AWS::EC2::RouteTable": "VpcId Tags",
    "AWS::EC2::Route": "RouteTableId DestinationCidrBlock GatewayId NatGatewayId",
    "AWS::EC2::Subnet": "VpcId AvailabilityZone CidrBlock Tags",
    "AWS::EC2::SubnetRouteTableAssociation": "SubnetId RouteTableId",
    "AWS::EC2::VPCEndpoint": "VpcId ServiceName VpcEndpointType RouteTableIds",
    "AWS::EC2::EIP": "Domain Tags",
    "AWS::EC2::NatGateway": "SubnetId AllocationId Tags",
    "AWS::EC2::SecurityGroup": "GroupName GroupDescription VpcId SecurityGroupIngress SecurityGroupEgress Tags",
    "AWS::EC2::SecurityGroupIngress": "GroupId IpProtocol FromPort ToPort SourceSecurityGroupId Description",
    "AWS::EC2::SecurityGroupEgress": "GroupId IpProtocol DestinationSecurityGroupId Description",
    "AWS::EC2::PlacementGroup": "Strategy",
    "AWS::EC2::LaunchTemplate": "LaunchTemplateName LaunchTemplateData",
    "AWS::Budgets::Budget": "Budget NotificationsWithSubscribers",
    "AWS::Lambda::Function": "FunctionName Handler Timeout Role Code",
    "AWS::ElasticLoadBalancingV2::LoadBalancer": "Name Type Scheme Subnets SecurityGroups Tags",
    "AWS::ElasticLoadBalancingV2::TargetGroup": "VpcId Protocol Port TargetType HealthCheckPath Tags",
    "AWS::ElasticLoadBalancingV2::Listener": "LoadBalancerArn Protocol Port SslPolicy Certificates DefaultActions",
    "AWS::S3::Bucket": "BucketName BucketEncryption PublicAccessBlockConfiguration Tags",
    "AWS::IAM::Role": "RoleName AssumeRolePolicyDocument PermissionsBoundary Tags",
    "AWS::IAM::InstanceProfile": "InstanceProfileName Roles",
    "AWS::IAM::Policy": "PolicyName Roles PolicyDocument",
}
"""Properties that the emulated cloud honors, by resource type."""
WITHOUT_EFFECT = {
    "AWS::Lambda::Function": "Description Runtime Tags",  # a function runs with this project's Python
    "AWS::EC2::PlacementGroup": "Tags",  # nothing lists placement groups
    "AWS::EC2::VPC": "EnableDnsSupport EnableDnsHostnames",  # hosts have no DNS
    "AWS::ElasticLoadBalancingV2::LoadBalancer": "LoadBalancerAttributes",  # no load balancer forwards requests
}
"""Properties that AWS honors and that change nothing in the emulated cloud, by resource type."""


def refuse_unmodeled(template: Mapping[str, Any]) -> None:
    """Raise `AwsError` if the template has a resource or a property that the emulated cloud does not model."""
    for name, body in template["Resources"].items():
        kind = body["Type"]
        if kind not in MODELED:
            raise _unmodeled(name, kind)
        known = f"{MODELED[kind]} {WITHOUT_EFFECT.get(kind, '')}".split()
        for key in body.get("Properties", {}).keys() - set(known):
            raise _unmodeled(name, f"{kind}.{key}")


def _unmodeled(name: str, what: str) -> AwsError:
    return AwsError(
        "ValidationError",
        f"the emulator does not model {what} of the resource {name}. Add it to raymill/emulator/stack_resources.py",
    )


class _Resource(CloudFormationModel):
    """A resource that `create` makes and `delete` ends. Subclasses set TYPE."""

    TYPE: ClassVar[str] = ""

    def __init__(self, physical_id: str) -> None:
        self.physical_id = physical_id

    @property
    def physical_resource_id(self) -> str:
        return self.physical_id

    @staticmethod
    def cloudformation_name_type() -> str:
        return ""

    @classmethod
    def cloudformation_type(cls) -> str:  # type: ignore[override]
        return cls.TYPE

    @classmethod
    def create_from_cloudformation_json(  # type: ignore[override]
        cls, resource_name: str, cloudformation_json: Any, account_id: str, region_name: str, **kwargs: Any
    ) -> "_Resource":
        del kwargs
        return cls(cls.create(ec2_backends[account_id][region_name], cloudformation_json["Properties"], resource_name))

    @classmethod
    def delete_from_cloudformation_json(  # type: ignore[override]
        cls, resource_name: str, cloudformation_json: Any, account_id: str, region_name: str
    ) -> None:
        del cloudformation_json  # its references are not resolved
        cls.end(ec2_backends[account_id][region_name], resource_name)

    @classmethod
    def update_from_cloudformation_json(  # type: ignore[override]
        cls,
        original_resource: "_Resource",
        new_resource_name: str,
        cloudformation_json: Any,
        account_id: str,
        region_name: str,
    ) -> "_Resource":
        raise AwsError("ValidationError", f"the emulator cannot update {cls.TYPE}")

    @staticmethod
    def create(ec2: Any, properties: dict[str, Any], name: str) -> str:
        """Create the resource and return its physical id. `name` is the name that CloudFormation would give it."""
        raise NotImplementedError

    @staticmethod
    def end(ec2: Any, physical_id: str) -> None:
        """Delete the resource. Raises moto's DependencyViolationError while another resource needs it."""
        raise NotImplementedError


class _OfMoto(CloudFormationModel):
    """Changes how a stack makes, updates or deletes one of moto's own resources. Subclasses set TYPE and NAME."""

    TYPE: ClassVar[str] = ""
    NAME: ClassVar[str] = ""
    """The property that names the resource."""

    @classmethod
    def cloudformation_name_type(cls) -> str:  # type: ignore[override]
        return cls.NAME

    @classmethod
    def cloudformation_type(cls) -> str:  # type: ignore[override]
        return cls.TYPE


class InternetGateway(_Resource):
    TYPE = "AWS::EC2::InternetGateway"

    @staticmethod
    def create(ec2: Any, properties: dict[str, Any], name: str) -> str:
        return ec2.create_internet_gateway(properties.get("Tags")).id

    @staticmethod
    def end(ec2: Any, physical_id: str) -> None:
        ec2.delete_internet_gateway(physical_id)


class VPCGatewayAttachment(_Resource):
    TYPE = "AWS::EC2::VPCGatewayAttachment"

    @staticmethod
    def create(ec2: Any, properties: dict[str, Any], name: str) -> str:
        ec2.attach_internet_gateway(properties["InternetGatewayId"], properties["VpcId"])
        return f"{properties['InternetGatewayId']}|{properties['VpcId']}"

    @staticmethod
    def end(ec2: Any, physical_id: str) -> None:
        gateways = [one for one in ec2.nat_gateways.values() if one.state != "deleted"]
        gateway, vpc = physical_id.split("|")
        if any(one.vpc_id == vpc for one in gateways):
            raise DependencyViolationError(f"Network {vpc} has some mapped public address(es)")
        ec2.detach_internet_gateway(gateway, vpc)


class RouteTable(_Resource):
    TYPE = "AWS::EC2::RouteTable"

    @staticmethod
    def create(ec2: Any, properties: dict[str, Any], name: str) -> str:
        return ec2.create_route_table(properties["VpcId"], properties.get("Tags")).id

    @staticmethod
    def end(ec2: Any, physical_id: str) -> None:
        ec2.delete_route_table(physical_id)


class Route(_Resource):
    TYPE = "AWS::EC2::Route"

    @staticmethod
    def create(ec2: Any, properties: dict[str, Any], name: str) -> str:
        ec2.create_route(
            properties["RouteTableId"],
            properties["DestinationCidrBlock"],
            gateway_id=properties.get("GatewayId"),
            nat_gateway_id=properties.get("NatGatewayId"),
        )
        return f"{properties['RouteTableId']}|{properties['DestinationCidrBlock']}"

    @staticmethod
    def end(ec2: Any, physical_id: str) -> None:
        table, destination = physical_id.split("|")
        if table in ec2.route_tables:  # a route ends with its table
            ec2.delete_route(table, destination)


class SubnetRouteTableAssociation(_Resource):
    TYPE = "AWS::EC2::SubnetRouteTableAssociation"

    @staticmethod
    def create(ec2: Any, properties: dict[str, Any], name: str) -> str:
        table, subnet = properties["RouteTableId"], properties["SubnetId"]
        for association, associated in _associations(ec2).items():
            if associated == subnet:
                return ec2.replace_route_table_association(association, table)
        return ec2.associate_route_table(table, subnet_id=subnet)

    @staticmethod
    def end(ec2: Any, physical_id: str) -> None:
        if physical_id in _associations(ec2):  # another table may have replaced it
            ec2.disassociate_route_table(physical_id)


def _associations(ec2: Any) -> dict[str, str]:
    """Return the subnets with a route table of their own, by the ids of the associations."""
    return {key: subnet for table in ec2.route_tables.values() for key, subnet in table._associations.items()}


class VPCEndpoint(_Resource):
    TYPE = "AWS::EC2::VPCEndpoint"

    @staticmethod
    def create(ec2: Any, properties: dict[str, Any], name: str) -> str:
        made = ec2.create_vpc_endpoint(
            properties["VpcId"],
            properties["ServiceName"],
            properties["VpcEndpointType"],
            policy_document=None,
            route_table_ids=properties["RouteTableIds"],
        )
        return made.id

    @staticmethod
    def end(ec2: Any, physical_id: str) -> None:
        endpoint = ec2.vpc_end_points[physical_id]
        endpoint.route_table_ids = [table for table in endpoint.route_table_ids if table in ec2.route_tables]
        ec2.delete_vpc_endpoints([physical_id])


class EIP(_Resource):
    TYPE = "AWS::EC2::EIP"

    @staticmethod
    def create(ec2: Any, properties: dict[str, Any], name: str) -> str:
        return ec2.allocate_address(properties["Domain"], tags=_tags(properties)).allocation_id

    @staticmethod
    def end(ec2: Any, physical_id: str) -> None:
        gateways = [one for one in ec2.nat_gateways.values() if one.state != "deleted"]
        if any(physical_id == address["allocationId"] for one in gateways for address in one.address_set):
            raise DependencyViolationError(f"{physical_id} is in use")
        ec2.release_address(allocation_id=physical_id)

    @classmethod
    def has_cfn_attr(cls, attr: str) -> bool:
        return attr == "AllocationId"

    def get_cfn_attribute(self, attribute_name: str) -> str:
        del attribute_name
        return self.physical_id


class NatGateway(_Resource):
    TYPE = "AWS::EC2::NatGateway"

    @staticmethod
    def create(ec2: Any, properties: dict[str, Any], name: str) -> str:
        made = ec2.create_nat_gateway(properties["SubnetId"], properties["AllocationId"], _tags(properties))
        return made.id

    @staticmethod
    def end(ec2: Any, physical_id: str) -> None:
        ec2.delete_nat_gateway(physical_id)


class SecurityGroup(_OfMoto):
    """moto's security group, with the rules for outgoing traffic.

    Such a rule replaces the default one, which allows all outgoing traffic, also if it is a resource of its own.
    https://docs.aws.amazon.com/AWSCloudFormation/latest/TemplateReference/aws-resource-ec2-securitygroupegress.html
    """

    TYPE = "AWS::EC2::SecurityGroup"
    NAME = "GroupName"

    @classmethod
    def create_from_cloudformation_json(cls, *args: Any, **kwargs: Any) -> Any:
        group = MotoSecurityGroup.create_from_cloudformation_json(*args, **kwargs)
        _, content, account, region = args
        for rule in content["Properties"].get("SecurityGroupEgress", []):
            replace_default_egress(group)
            ranges = [{"CidrIp": rule["CidrIp"], "Description": rule.get("Description", "")}]
            _authorize_egress(ec2_backends[account][region], group.id, rule["IpProtocol"], ip_ranges=ranges)
        return group

    @classmethod
    def update_from_cloudformation_json(cls, *args: Any, **kwargs: Any) -> Any:
        """Change the rules for addresses, while moto makes another group. Rules for groups are other resources."""
        del args
        group, ec2 = kwargs["original_resource"], ec2_backends[kwargs["account_id"]][kwargs["region_name"]]
        group.ingress_rules = [rule for rule in group.ingress_rules if rule.source_group]
        for rule in kwargs["cloudformation_json"]["Properties"].get("SecurityGroupIngress", []):
            ports = rule["FromPort"], rule["ToPort"]
            ec2.authorize_security_group_ingress(group.id, rule["IpProtocol"], *ports, ip_ranges=rule["CidrIp"])
        return group

    delete_from_cloudformation_json = MotoSecurityGroup.delete_from_cloudformation_json


class SecurityGroupIngress(_Resource):
    """A rule that lets another group connect."""

    TYPE = "AWS::EC2::SecurityGroupIngress"

    @staticmethod
    def create(ec2: Any, properties: dict[str, Any], name: str) -> str:
        source, ports = properties["SourceSecurityGroupId"], (properties.get("FromPort"), properties.get("ToPort"))
        ec2.authorize_security_group_ingress(
            properties["GroupId"], properties["IpProtocol"], *ports, ip_ranges=[], source_groups=[{"GroupId": source}]
        )
        return f"{properties['GroupId']}|{source}|{ports[0]}"

    @staticmethod
    def end(ec2: Any, physical_id: str) -> None:
        group_id, source, port = physical_id.split("|")
        if group := ec2.get_security_group_by_name_or_id(group_id):
            group.ingress_rules = [
                rule
                for rule in group.ingress_rules
                if (str(rule.from_port), (rule.source_group or {}).get("GroupId")) != (port, source)
            ]


class SecurityGroupEgress(_Resource):
    TYPE = "AWS::EC2::SecurityGroupEgress"

    @staticmethod
    def create(ec2: Any, properties: dict[str, Any], name: str) -> str:
        group = ec2.get_security_group_by_name_or_id(properties["GroupId"])
        replace_default_egress(group)
        to = [{"GroupId": properties["DestinationSecurityGroupId"]}]
        _authorize_egress(ec2, group.id, properties["IpProtocol"], source_groups=to)
        return group.id

    @staticmethod
    def end(ec2: Any, physical_id: str) -> None:
        group = ec2.get_security_group_by_name_or_id(physical_id)
        if group:
            group.egress_rules = [rule for rule in group.egress_rules if not rule.source_group]


def replace_default_egress(group: Any) -> None:
    """Remove the rule that EC2 gives every new group, which has no description."""
    group.egress_rules = [
        rule for rule in group.egress_rules if rule.source_group or (rule.ip_range or {}).get("Description") is not None
    ]


def _authorize_egress(ec2: Any, group_id: str, protocol: str, **whom: Any) -> None:
    ec2.authorize_security_group_egress(group_id, protocol, None, None, **{"ip_ranges": [], **whom})


PLACEMENT_GROUPS: set[str] = set()
"""The names of all placement groups."""


class PlacementGroup(_Resource):
    TYPE = "AWS::EC2::PlacementGroup"

    @staticmethod
    def create(ec2: Any, properties: dict[str, Any], name: str) -> str:
        PLACEMENT_GROUPS.add(name)
        return name

    @staticmethod
    def end(ec2: Any, physical_id: str) -> None:
        if any(one.placement.group_name == physical_id for one in _running(ec2)):
            raise DependencyViolationError(f"the placement group {physical_id} is in use and may not be deleted")
        PLACEMENT_GROUPS.remove(physical_id)


class Budget(_Resource):
    """A budget. The emulated cloud sends no e-mail, because nothing costs money there."""

    TYPE = "AWS::Budgets::Budget"

    @staticmethod
    def create(ec2: Any, properties: dict[str, Any], name: str) -> str:
        budget, account = {"BudgetName": name} | properties["Budget"], ec2.account_id
        budgets_backends[account]["aws"].create_budget(account, budget, properties["NotificationsWithSubscribers"])
        return budget["BudgetName"]

    @classmethod
    def update_from_cloudformation_json(cls, *args: Any, **kwargs: Any) -> "Budget":  # type: ignore[override]
        del args
        budget, account = kwargs["original_resource"], kwargs["account_id"]
        wanted = kwargs["cloudformation_json"]["Properties"]["Budget"]
        found = budgets_backends[account]["aws"].budgets[account][budget.physical_id].budget
        found["BudgetLimit"] = wanted["BudgetLimit"]
        return budget

    @staticmethod
    def end(ec2: Any, physical_id: str) -> None:
        budgets_backends[ec2.account_id]["aws"].delete_budget(ec2.account_id, physical_id)


class LoadBalancer(_OfMoto):
    """moto's load balancer, of which an update can change the subnets."""

    TYPE = "AWS::ElasticLoadBalancingV2::LoadBalancer"
    NAME = "Name"

    @classmethod
    def update_from_cloudformation_json(cls, *args: Any, **kwargs: Any) -> Any:
        del args
        balancer, wanted = kwargs["original_resource"], kwargs["cloudformation_json"]["Properties"]
        backend = elbv2_backends[kwargs["account_id"]][kwargs["region_name"]]
        backend.set_subnets(balancer.arn, wanted["Subnets"], [])
        return balancer

    create_from_cloudformation_json = FakeLoadBalancer.create_from_cloudformation_json
    delete_from_cloudformation_json = FakeLoadBalancer.delete_from_cloudformation_json


class Listener(_OfMoto):
    """moto's listener, which moto deletes only with its load balancer."""

    TYPE = "AWS::ElasticLoadBalancingV2::Listener"

    @classmethod
    def delete_from_cloudformation_json(  # type: ignore[override]
        cls, resource_name: str, cloudformation_json: Any, account_id: str, region_name: str
    ) -> None:
        elbv2_backends[account_id][region_name].delete_listener(resource_name)

    create_from_cloudformation_json = FakeListener.create_from_cloudformation_json
    update_from_cloudformation_json = FakeListener.update_from_cloudformation_json


class TargetGroup(_OfMoto):
    """moto's target group, which moto never deletes."""

    TYPE = "AWS::ElasticLoadBalancingV2::TargetGroup"
    NAME = "Name"

    @classmethod
    def delete_from_cloudformation_json(  # type: ignore[override]
        cls, resource_name: str, cloudformation_json: Any, account_id: str, region_name: str
    ) -> None:
        elbv2_backends[account_id][region_name].delete_target_group(resource_name)

    create_from_cloudformation_json = FakeTargetGroup.create_from_cloudformation_json


class Role(_OfMoto):
    """moto's role, of which an update can change the permissions boundary."""

    TYPE = "AWS::IAM::Role"
    NAME = "RoleName"

    @classmethod
    def has_cfn_attr(cls, attr: str) -> bool:
        return attr == "Arn"

    @classmethod
    def update_from_cloudformation_json(cls, *args: Any, **kwargs: Any) -> Any:
        del args
        role, wanted = kwargs["original_resource"], kwargs["cloudformation_json"]["Properties"]
        role.permissions_boundary_arn = wanted.get("PermissionsBoundary", "")
        return role

    create_from_cloudformation_json = MotoRole.create_from_cloudformation_json
    delete_from_cloudformation_json = MotoRole.delete_from_cloudformation_json


class Bucket(_OfMoto):
    """moto's bucket, with the block of public access."""

    TYPE = "AWS::S3::Bucket"
    NAME = "BucketName"

    @classmethod
    def create_from_cloudformation_json(cls, *args: Any, **kwargs: Any) -> Any:
        bucket = FakeBucket.create_from_cloudformation_json(*args, **kwargs)
        _, content, account, _ = args
        if block := content["Properties"].get("PublicAccessBlockConfiguration"):
            s3_backends[account]["aws"].put_public_access_block(bucket.name, block)
        return bucket

    update_from_cloudformation_json = FakeBucket.update_from_cloudformation_json
    delete_from_cloudformation_json = FakeBucket.delete_from_cloudformation_json


get_model_map().update({kind.TYPE: kind for kind in (*_Resource.__subclasses__(), *_OfMoto.__subclasses__())})


def _running(ec2: Any) -> Iterator[Any]:
    for reservation in ec2.reservations.values():
        yield from (one for one in reservation.instances if one.state != "terminated")


def _tags(properties: Mapping[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in properties.get("Tags", [])}

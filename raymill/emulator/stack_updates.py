"""How CloudFormation creates, updates and deletes the resources of a stack.

moto updates every changed resource in place, keeps resources of which the condition does not hold any more, needs no
permission of the caller, and forgets a stack that it cannot delete. On AWS:

- A change of some properties replaces a resource. The new one exists before the old one is deleted, so a resource with
  a fixed name cannot be replaced.
  https://docs.aws.amazon.com/AWSCloudFormation/latest/UserGuide/using-cfn-updating-stacks-update-behaviors.html
- CloudFormation calls the other services with the permissions of the caller.
  https://docs.aws.amazon.com/AWSCloudFormation/latest/UserGuide/using-iam-servicerole.html
- What fails ends up in the events of the stack, not in the answer to the call.

Importing this module changes moto's classes. An operation that fails here changes nothing, as after AWS's rollback.
"""

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from moto.cloudformation import parsing
from moto.cloudformation.exceptions import ValidationError
from moto.cloudformation.models import CloudFormationBackend, Event, Stack
from moto.cloudformation.parsing import OutputMap, ResourceMap
from moto.core.exceptions import ServiceException
from moto.iam.models import iam_backends

from raymill.emulator import registry
from raymill.emulator.iam import AwsError, Permission, Principal, account_of, authorize
from raymill.emulator.moto_instances import ACCOUNT

CALLER: ContextVar[Principal | None] = ContextVar("caller", default=None)
"""Who called CloudFormation. None: somebody with all permissions."""
BALANCING = "elasticloadbalancing.amazonaws.com"
BALANCING_ROLE = "AWSServiceRoleForElasticLoadBalancing"
NAMED = {"AWS::IAM::Role": "role/{RoleName}", "AWS::IAM::InstanceProfile": "instance-profile/{InstanceProfileName}"}
"""Resources of IAM actions in ARNs."""
PASSED_TO = {"AWS::Lambda::Function": "lambda.amazonaws.com", "AWS::IAM::InstanceProfile": "ec2.amazonaws.com"}


class ResourceFailed(Exception):
    """An operation on a stack fails because of one resource."""

    def __init__(self, resource: str, handler: str, reason: str) -> None:
        super().__init__(f"{resource}: {reason}")
        self.resource, self.reason = resource, reason
        self.status = f"{handler.upper()}_FAILED"


class _Unmade:
    """A resource that an update will make. Its ids are not known yet."""

    def __init__(self, name: str) -> None:
        self.physical_resource_id = f"(new {name})"

    def get_cfn_attribute(self, attribute: str) -> str:
        return f"{self.physical_resource_id}.{attribute}"


# ---------------------------------------------------------------- resources


def create(resources: ResourceMap, template: dict[str, Any]) -> bool:
    """Create the resources of a new stack. If one fails, delete the others and raise `ResourceFailed`."""
    for name in _in_order(template):
        body = template["Resources"][name]
        try:
            if _exists_in(resources, body):
                _require(name, body["Type"], "create", _properties(resources, body))
                _ = resources[name]  # creates it
        except (ResourceFailed, ServiceException) as error:
            _clean_up(resources, [(template["Resources"][key], one) for key, one in reversed(_made(resources).items())])
            raise (
                error if isinstance(error, ResourceFailed) else ResourceFailed(name, "create", error.message)
            ) from None
    return _moto_create(resources, template)


def update(resources: ResourceMap, template: dict[str, Any], parameters: dict[str, Any] | None = None) -> None:
    """Update the resources of a stack. Raises `ResourceFailed` before it changes anything."""
    old = {name: (resources._resource_json_map[name], one) for name, one in _made(resources).items()}
    before = {name: _properties(resources, body) for name, (body, _) in old.items()}
    trial = copy.copy(resources)
    trial._parsed_resources, trial.resolved_parameters = dict(resources._parsed_resources), {}
    _load(trial, template, parameters)
    steps = list(_plan(trial, template, before))
    removed = [name for name in old if not _exists_in(trial, template["Resources"].get(name))]
    replaced = [name for name, step in steps if step == "replace"]
    if not steps and not removed and template.get("Outputs") == resources._template.get("Outputs"):
        raise ValidationError(message="No updates are to be performed.")
    for name in (*removed, *replaced):
        _require(name, old[name][0]["Type"], "delete", before[name])
    _load(resources, template, parameters)
    for name, step in steps:
        if step == "update":
            _update_in_place(resources, name, template["Resources"][name])
            continue
        resources._parsed_resources.pop(name, None)
        _ = resources[name]  # creates it
    for name in removed:
        resources._parsed_resources.pop(name)
    _clean_up(resources, [old[name] for name in reversed(list(old)) if name in (*removed, *replaced)])


def _load(resources: ResourceMap, template: dict[str, Any], parameters: dict[str, Any] | None) -> None:
    resources._template, resources._resource_json_map = template, template["Resources"]
    resources.input_parameters = parameters or resources.input_parameters
    resources.load_parameters()
    resources.load_conditions()


def _plan(
    trial: ResourceMap, template: dict[str, Any], before: Mapping[str, dict[str, Any]]
) -> Iterator[tuple[str, str]]:
    """Yield the resources that an update creates, replaces or updates, in order. Raises `ResourceFailed`."""
    for name in _in_order(template):
        body = template["Resources"][name]
        if not _exists_in(trial, body):
            trial._parsed_resources.pop(name, None)
            continue
        kind, properties = body["Type"], _properties(trial, body)
        step = _step(name, kind, before.get(name), properties)
        if not step:
            continue
        _require(name, kind, "create" if step == "replace" else step, properties, before.get(name, {}))
        if step != "update":
            trial._parsed_resources[name] = _Unmade(name)
        yield name, step


def _step(name: str, kind: str, old: dict[str, Any] | None, new: dict[str, Any]) -> str:
    """Return "create", "replace", "update", or "" if the resource stays as it is. Raises `ResourceFailed`."""
    if old is None:
        return "create"
    if old == new:
        return ""
    forcing = registry.force_replacement(kind)
    if all(registry.value(old, path) == registry.value(new, path) for path in forcing):
        return "update"
    for path in registry.NAMES:
        fixed = registry.value(new, path) if path in forcing else None
        if fixed is not None and fixed == registry.value(old, path):
            reason = "CloudFormation cannot update a stack when a custom-named resource requires replacing."
            raise ResourceFailed(name, "update", f"{reason} Rename {fixed} and update the stack again.")
    return "replace"


def _update_in_place(resources: ResourceMap, name: str, body: dict[str, Any]) -> None:
    args = (name, body, resources, resources._account_id, resources._region_name)
    updated = parsing.parse_and_update_resource(*args)
    if updated is None:
        raise AwsError("ValidationError", f"the emulator cannot update {body['Type']} in place")
    resources._parsed_resources[name] = updated


def delete(resources: ResourceMap) -> None:
    """Delete the resources of a stack. Raises `ResourceFailed`."""
    made = {name: (resources._resource_json_map[name], one) for name, one in _made(resources).items()}
    for name, (body, _) in made.items():
        if body.get("DeletionPolicy") != "Retain":
            _require(name, body["Type"], "delete", _properties(resources, body))
    left = _clean_up(resources, list(reversed(made.values())))
    for name, (_, one) in made.items():
        if one not in left:
            resources._parsed_resources.pop(name)
    if left:
        name = next(name for name, (_, one) in made.items() if one in left)
        raise ResourceFailed(name, "delete", "the resource has a dependent object")


def _clean_up(resources: ResourceMap, old: list[tuple[dict[str, Any], Any]]) -> list[Any]:
    """Delete resources, each given with its part of the template. Return those that others still need.

    After an update, these stay in the account, and belong to no stack any more.
    https://docs.aws.amazon.com/AWSCloudFormation/latest/UserGuide/troubleshooting.html
    """
    left = [(body, one) for body, one in old if body.get("DeletionPolicy") != "Retain"]
    while left:  # the order of the template is not that of dependencies
        remaining = [(body, one) for body, one in left if not _try_to_delete(resources, body, one)]
        if len(remaining) == len(left):
            break
        left = remaining
    return [one for _, one in left]


def _try_to_delete(resources: ResourceMap, body: dict[str, Any], one: Any) -> bool:
    model = parsing.get_model_map()[body["Type"]]
    if not hasattr(one, "delete") and hasattr(model.delete_from_cloudformation_json, "__isabstractmethod__"):
        raise AwsError("ValidationError", f"the emulator cannot delete {body['Type']}")
    try:
        resources._delete_resource(one, body)
    except ServiceException:
        return False
    return True


# ---------------------------------------------------------------- templates


def _made(resources: ResourceMap) -> dict[str, Any]:
    """Return the existing resources by their logical ids."""
    parsed = resources._parsed_resources
    return {name: parsed[name] for name in resources._resource_json_map if parsed.get(name) is not None}


def _exists_in(resources: ResourceMap, body: dict[str, Any] | None) -> bool:
    """Return whether a resource is in the template and its condition holds."""
    return body is not None and ("Condition" not in body or bool(resources.lazy_condition_map[body["Condition"]]))


def _properties(resources: ResourceMap, body: dict[str, Any]) -> dict[str, Any]:
    return parsing.clean_json(copy.deepcopy(body.get("Properties", {})), resources)


def _in_order(template: dict[str, Any]) -> list[str]:
    """Return the names of all resources, each after those that it refers to."""
    bodies, ordered = template["Resources"], dict[str, None]()

    def add(name: str) -> None:
        for other in _references(bodies[name]):
            if other in bodies and other not in ordered and other != name:
                add(other)
        ordered[name] = None

    for name in bodies:
        add(name)
    return list(ordered)


def _references(body: Any) -> Iterator[str]:
    """Yield the names to which a part of a template refers."""
    if isinstance(body, list):
        for one in body:
            yield from _references(one)
    elif isinstance(body, dict):
        for key, inner in body.items():
            if key == "Ref":
                yield inner
            elif key == "Fn::GetAtt":
                yield inner[0]
            elif key == "DependsOn":
                yield from [inner] if isinstance(inner, str) else inner
            elif key == "Fn::Sub":
                yield from re.findall(r"\$\{(\w+)", inner if isinstance(inner, str) else inner[0])
                yield from _references(inner[1:] if isinstance(inner, list) else [])
            else:
                yield from _references(inner)


# ---------------------------------------------------------------- permissions


def _require(
    name: str, kind: str, handler: str, properties: dict[str, Any], old: Mapping[str, Any] | None = None
) -> None:
    """Raise `ResourceFailed` if CloudFormation's caller may not create, update or delete a resource."""
    principal = CALLER.get()
    try:
        if principal:
            authorize(principal, _permissions(kind, handler, properties, old or {}))
        if kind == "AWS::ElasticLoadBalancingV2::LoadBalancer" and handler == "create":
            _ensure_balancing_role(principal)
    except AwsError as error:
        raise ResourceFailed(name, handler, error.message) from None


def _permissions(kind: str, handler: str, properties: dict[str, Any], old: Mapping[str, Any]) -> Iterator[Permission]:
    """Yield what a handler needs. Only IAM's actions have resources and conditions here."""
    boundary = properties.get("PermissionsBoundary", "")
    boundary_change = "" if boundary == old.get("PermissionsBoundary", "") else "Put" if boundary else "Delete"
    for action in registry.actions(kind, handler):
        if action.endswith("RolePermissionsBoundary") and action != f"iam:{boundary_change}RolePermissionsBoundary":
            continue
        if action == "iam:PassRole":
            yield Permission(action, _passed(kind, properties), {"iam:PassedToService": PASSED_TO[kind]})
        elif kind in NAMED:
            resource = f"arn:aws:iam::{_account()}:{NAMED[kind].format(**properties)}"
            yield Permission(action, resource, {"iam:PermissionsBoundary": boundary} if boundary else {})
        elif kind == "AWS::IAM::Policy":
            for role in properties["Roles"]:
                yield Permission(action, f"arn:aws:iam::{_account()}:role/{role}", _boundary_of(role))
        else:
            yield Permission(action, "*", {})


def _passed(kind: str, properties: dict[str, Any]) -> str:
    """Return the ARN of the role that a function or an instance profile gets."""
    return (
        properties["Role"] if kind.endswith("Function") else f"arn:aws:iam::{_account()}:role/{properties['Roles'][0]}"
    )


def _account() -> str:
    principal = CALLER.get()
    return account_of(principal.arn) if principal else ACCOUNT


def _boundary_of(role: str) -> dict[str, str]:
    found = iam_backends[_account()]["aws"].roles.values()
    boundary = next((one.permissions_boundary_arn for one in found if one.name == role), "")
    return {"iam:PermissionsBoundary": boundary} if boundary else {}


def _ensure_balancing_role(principal: Principal | None) -> None:
    """Create the role that the first load balancer of an account needs.

    https://docs.aws.amazon.com/elasticloadbalancing/latest/userguide/elb-service-linked-roles.html
    """
    iam = iam_backends[_account()]["aws"]
    if any(role.name == BALANCING_ROLE for role in iam.roles.values()):
        return
    path = f"/aws-service-role/{BALANCING}/"
    if principal:
        arn = f"arn:aws:iam::{_account()}:role{path}{BALANCING_ROLE}"
        authorize(principal, [Permission("iam:CreateServiceLinkedRole", arn, {"iam:AWSServiceName": BALANCING})])
    iam.create_role(BALANCING_ROLE, "{}", path, None, "", [], "3600", None)


# ---------------------------------------------------------------- stacks


def _parse_template(template: str) -> dict[str, Any]:
    """Read a template, in a hundredth of the time that moto takes to read JSON as YAML."""
    try:
        return json.loads(template)
    except json.JSONDecodeError:
        return _moto_parse_template(template)


def _create_stack(self: CloudFormationBackend, *args: Any, **kwargs: Any) -> Stack:
    """Create a stack. If that fails, only its events are left, because the project passes OnFailure=DELETE."""
    known = set(self.stacks)
    try:
        return _moto_create_stack(self, *args, **kwargs)
    except ResourceFailed as error:
        (stack_id,) = set(self.stacks) - known
        stack = self.deleted_stacks[stack_id] = self.stacks.pop(stack_id)
        stack.resource_map._resource_json_map = {}  # moto makes a resource when somebody looks at it
        stack.output_map = OutputMap(stack.resource_map, {}, stack_id)
        note_failure(stack, error)
        stack.status = "DELETE_COMPLETE"
        return stack


def _update_stack(self: Stack, template: str, *args: Any, **kwargs: Any) -> None:
    before, events = self.template, list(self.events)
    try:
        _moto_update_stack(self, template, *args, **kwargs)
    except (ResourceFailed, ValidationError) as error:
        self.template = before
        self._parse_template()
        if isinstance(error, ValidationError):
            self.events = events
            raise
        note_failure(self, error)
        self.status = "UPDATE_ROLLBACK_COMPLETE"


def _delete_stack(self: CloudFormationBackend, name_or_stack_id: str) -> None:
    stack = self.stacks.get(name_or_stack_id)
    try:
        _moto_delete_stack(self, name_or_stack_id)
    except ResourceFailed as error:
        assert stack
        self.stacks[stack.stack_id] = stack
        note_failure(stack, error)
        stack.status = "DELETE_FAILED"


def note_failure(stack: Stack, error: ResourceFailed) -> None:
    """Add the failure to the stack's events."""
    names: dict[str, Any] = {"logical_resource_id": error.resource, "physical_resource_id": "", "resource_type": ""}
    outcome = {"resource_status": error.status, "resource_status_reason": error.reason, "resource_properties": None}
    event: Any = Event(stack.stack_id, stack.name, **names, **outcome)
    stack.events.append(event)


_moto_create: Callable[..., Any] = ResourceMap.create
_moto_create_stack: Callable[..., Any] = CloudFormationBackend.create_stack
_moto_update_stack: Callable[..., Any] = Stack.update
_moto_parse_template: Callable[..., Any] = Stack.parse_template
_moto_delete_stack: Callable[..., Any] = CloudFormationBackend.delete_stack
for changed, methods in {
    ResourceMap: {"create": create, "update": update, "delete": delete},
    Stack: {"update": _update_stack, "parse_template": staticmethod(_parse_template)},
    CloudFormationBackend: {"create_stack": _create_stack, "delete_stack": _delete_stack},
}.items():
    for method, replacement in methods.items():
        setattr(changed, method, replacement)

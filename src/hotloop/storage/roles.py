"""The least that a job needs on Google Cloud and Azure: roles with conditions, as commands to run once.

Google: "Attribute reference for IAM Conditions" (`objectListPrefix` is what a list asks for). Azure: "Actions and
attributes for Azure role assignment conditions". A condition holds for what is below a prefix, or for one list of it.
"""

import json
import shlex
from collections.abc import Sequence

from hotloop.storage.places import Place

_GOOGLE = {
    False: "storage.objects.get,storage.objects.list",
    True: "storage.objects.get,storage.objects.list,storage.objects.create,storage.objects.delete,"
    "storage.multipartUploads.create,storage.multipartUploads.abort",
}
_MOST_NAMES = 10
"""Of single objects in a condition, of which Google allows 12 operators."""
_BLOBS = "Microsoft.Storage/storageAccounts/blobServices/containers/blobs"
_ACCOUNT = "/subscriptions/$SUBSCRIPTION/resourceGroups/$GROUP/providers/Microsoft.Storage/storageAccounts/$ACCOUNT"


def google_commands(places: Sequence[Place]) -> list[str]:
    """Custom roles of a project, and a binding a place; for a shell that knows $PROJECT and $MEMBER.

    Buckets need uniform bucket-level access. The oldest version of TLS is a matter of the organisation's policy there.
    """
    roles = [
        f"gcloud iam roles create {_role(writes)} --project=$PROJECT --permissions={_GOOGLE[writes]}"
        for writes in sorted({place.writes for place in places})
    ]
    return roles + [_binding(place) for place in places]


def _role(writes: bool) -> str:
    return "hotloopCheckpoints" if writes else "hotloopData"


def _binding(place: Place) -> str:
    quoted = [_quoted(f"projects/_/buckets/{place.bucket}/objects/{one}") for one in place.names or (place.prefix,)]
    if place.names:
        allowed = [f"resource.name == {one}" for one in quoted]
        allowed = allowed if len(allowed) <= _MOST_NAMES else [_starting(place)]
    else:
        listed = f'api.getAttribute("storage.googleapis.com/objectListPrefix", "").startsWith({_quoted(place.prefix)})'
        allowed = [_starting(place), listed]
    condition = json.dumps({"title": _role(place.writes), "expression": " || ".join(allowed)})
    role = f"projects/$PROJECT/roles/{_role(place.writes)}"
    return (
        f"gcloud storage buckets add-iam-policy-binding gs://{place.bucket} --member=$MEMBER --role={role} "
        f"--condition-from-file=/dev/stdin <<'END'\n{condition}\nEND"
    )


def _starting(place: Place) -> str:
    return f"resource.name.startsWith({_quoted(f'projects/_/buckets/{place.bucket}/objects/{place.prefix}')})"


def _quoted(text: str) -> str:
    """As a text of CEL, which is written like one of JSON."""
    return json.dumps(text)


def azure_commands(places: Sequence[Place]) -> list[str]:
    """A custom role if something is written, an assignment a place, and what the account refuses.

    For a shell that knows $SUBSCRIPTION, $GROUP, $ACCOUNT and $MEMBER (an id). An account cannot refuse TLS 1.2;
    the training does, unless `storage.tls` says otherwise.
    """
    commands = []
    if any(place.writes for place in places):
        role = {
            "Name": "hotloop checkpoints",
            "Description": "Write, read and remove blobs.",
            "Actions": [],
            "DataActions": [f"{_BLOBS}/{action}" for action in ("read", "write", "delete")],
            "AssignableScopes": ["/subscriptions/$SUBSCRIPTION"],
        }
        text = json.dumps(role).replace("$SUBSCRIPTION", "'$SUBSCRIPTION'")
        commands.append(f"az role definition create --role-definition '{text}'")
    commands += [_assignment(place) for place in places]
    account = f"az storage account update --ids {_ACCOUNT} --https-only true --min-tls-version TLS1_2"
    return [*commands, account]


def _assignment(place: Place) -> str:
    """Of a container; a list has no path and all else has no prefix, so each is asked about by itself."""
    is_list = f"ActionMatches{{'{_BLOBS}/read'}} AND SubOperationMatches{{'Blob.List'}}"
    path, below = f"@Resource[{_BLOBS}:path]", _azure_quoted(place.prefix)
    if 0 < len(place.names) <= _MOST_NAMES:
        named = "(" + " OR ".join(f"{path} StringEquals {_azure_quoted(name)}" for name in place.names) + ")"
    else:
        named = f"{path} StringStartsWith {below}"
    listed = f"@Request[{_BLOBS}:prefix] StringStartsWith {below}"
    condition = f"((!({is_list})) OR ({listed})) AND (({is_list}) OR ({named}))"
    if place.names:
        condition = f"(!({is_list})) AND ({named})"
    role = "hotloop checkpoints" if place.writes else "Storage Blob Data Reader"
    scope = f"{_ACCOUNT}/blobServices/default/containers/{place.bucket}"
    limited = f" --condition-version 2.0 --condition {shlex.quote(condition)}" if place.prefix else ""
    who = "--assignee-object-id $MEMBER --assignee-principal-type ServicePrincipal"
    return f"az role assignment create --role {shlex.quote(role)} {who} --scope {scope}{limited}"


def _azure_quoted(text: str) -> str:
    return "'" + text.replace("'", "\\'") + "'"

"""Examples of JSON Schema's own documents, draft 2020-12: those to which answers can be held, and those refused.

They follow the specifications of core and validation, "Understanding JSON Schema" and the examples of json-schema.org.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

DRAFT = "https://json-schema.org/draft/2020-12/schema"
TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}


def _page(name: str) -> Schema:
    return {"$id": f"https://example.com/{name}.schema.json", "$schema": DRAFT}


def _object(required: str = "", **properties: Any) -> Schema:
    schema: Schema = {"type": "object", "properties": properties}
    return schema | ({"required": required.split()} if required else {})


PRODUCT = _page("product") | {
    "title": "Product",
    "description": "A product in the catalog",
    "type": "object",
    "properties": {
        "productId": {"description": "The unique identifier for a product", "type": "integer"},
        "productName": {"description": "Name of the product", "type": "string"},
        "price": {"description": "The price of the product", "type": "number", "exclusiveMinimum": 0},
        "tags": {"description": "Tags for the product", "type": "array", "items": {"type": "string"}, "minItems": 1},
        "dimensions": _object("length width height", length=NUMBER, width=NUMBER, height=NUMBER),
    },
    "required": ["productId", "productName", "price"],
}
ADDRESS = _page("address") | _object(
    "locality region countryName",
    postOfficeBox=TEXT, extendedAddress=TEXT, streetAddress=TEXT, locality=TEXT, region=TEXT, postalCode=TEXT,
    countryName=TEXT,
)  # fmt: skip
VEGGIE = _object(
    "veggieName veggieLike",
    veggieName={"type": "string", "description": "The name of the vegetable."},
    veggieLike={"type": "boolean", "description": "Do I like this vegetable?"},
)
STREET = {
    "number": {"type": "number"},
    "street_name": {"type": "string"},
    "street_type": {"enum": ["Street", "Avenue", "Boulevard"]},
}
TUPLE: Schema = {
    "type": "array",
    "prefixItems": [NUMBER, TEXT, {"enum": ["Street", "Avenue", "Boulevard"]}, {"enum": ["NW", "NE", "SW", "SE"]}],
}
PERSON = _page("person") | _object(firstName=TEXT, lastName=TEXT, age=COUNT | {"description": "Age in years"})

EXAMPLES: dict[str, Any] = {
    # json-schema.org: getting started, miscellaneous and other examples
    "product": PRODUCT,
    "person": PERSON,
    "arrays of things": _page("arrays")
    | _object(
        fruits={"type": "array", "items": TEXT},
        vegetables={"type": "array", "items": {"$ref": "#/$defs/veggie"}},
    )
    | {"$defs": {"veggie": VEGGIE}},
    "enumerated values": _page("enumerated") | _object(data={"enum": [42, True, "hello", None, [1, 2, 3]]}),
    "regular expression": _page("regex") | _object(code={"type": "string", "pattern": "^[A-Z]{3}-\\d{3}$"}),
    "complex object": _page("complex")
    | _object(
        "name age",
        name=TEXT,
        age=COUNT,
        address=_object(
            "street city state postalCode",
            street=TEXT, city=TEXT, state=TEXT, postalCode={"type": "string", "pattern": "\\d{5}"},
        ),
        hobbies={"type": "array", "items": TEXT},
    ),
    "address": ADDRESS,
    "geographical location": _page("geo")
    | _object(
        "latitude longitude",
        latitude={"type": "number", "minimum": -90, "maximum": 90},
        longitude={"type": "number", "minimum": -180, "maximum": 180},
    ),
    "card": _page("card")
    | _object(
        "familyName givenName",
        fn={"description": "Formatted Name", "type": "string"},
        familyName=TEXT,
        givenName=TEXT,
        additionalName={"type": "array", "items": TEXT},
        nickname=TEXT,
        email=_object(type=TEXT, value=TEXT),
        tel=_object(type=TEXT, value=TEXT),
        adr={"$ref": "#/$defs/address"},
        geo=_object(latitude=NUMBER, longitude=NUMBER),
        bday={"type": "string", "format": "date"},
        org=_object(organizationName=TEXT, organizationUnit=TEXT),
    )
    | {"$defs": {"address": _object("locality region", streetAddress=TEXT, locality=TEXT, region=TEXT)}},
    "calendar": _page("calendar")
    | _object(
        "startDate summary",
        startDate={"type": "string", "format": "date-time"},
        endDate={"type": "string", "format": "date-time"},
        summary=TEXT,
        location=TEXT,
        url={"type": "string", "format": "uri"},
        duration={"type": "string", "format": "duration", "description": "Event duration"},
        category=TEXT,
        geo=_object(latitude=NUMBER, longitude=NUMBER),
    ),
    "blog post": _page("blog")
    | _object(
        "title content author",
        title=TEXT,
        content=TEXT,
        publishedDate={"type": "string", "format": "date-time"},
        author=_object("username email", username=TEXT, email={"type": "string", "format": "email"}),
        tags={"type": "array", "items": TEXT},
    ),
    "movie": _page("movie")
    | _object(
        "title director releaseDate",
        title=TEXT,
        director=TEXT,
        releaseDate={"type": "string", "format": "date"},
        genre={"type": "string", "enum": ["Action", "Comedy", "Drama", "Science Fiction"]},
        duration=TEXT,
        cast={"type": "array", "items": TEXT, "additionalItems": False},
    ),
    "job posting": _page("job")
    | _object(
        "title company location description",
        title=TEXT, company=TEXT, location=TEXT, description=TEXT, employmentType=TEXT,
        salary=NUMBER | {"minimum": 0},
        applicationDeadline={"type": "string", "format": "date"},
    ),
    "user profile": _page("user")
    | _object(
        "username email",
        username=TEXT,
        email={"type": "string", "format": "email"},
        fullName=TEXT,
        age=COUNT,
        location=TEXT,
        interests={"type": "array", "items": TEXT},
    ),
    "health record": _page("health")
    | _object(
        "patientName dateOfBirth bloodType",
        patientName=TEXT,
        dateOfBirth={"type": "string", "format": "date"},
        bloodType=TEXT,
        allergies={"type": "array", "items": TEXT},
        emergencyContact=_object(contactName=TEXT, contactPhone=TEXT),
    ),
    "shop": _page("shop")
    | {
        "$defs": {
            "product": _object("name price", name=TEXT, price=NUMBER | {"minimum": 0}),
            "order": _object(
                "orderId items", orderId=TEXT, items={"type": "array", "items": {"$ref": "#/$defs/product"}}
            ),
        },
        "$ref": "#/$defs/order",
    },
    "file system entry of the disk": _object(
        "type device",
        type={"enum": ["disk"]},
        device={"type": "string", "pattern": "^/dev/[^/]+(/[^/]+)*$"},
    )
    | {"additionalProperties": False},
    # Understanding JSON Schema
    "length": {"type": "string", "minLength": 2, "maxLength": 3},
    "telephone": {"type": "string", "pattern": "^(\\([0-9]{3}\\))?[0-9]{3}-[0-9]{4}$"},
    "multiples of ten": {"type": "number", "multipleOf": 10},
    "multiples of a hundredth": {"type": "number", "multipleOf": 0.01},
    "range": {"type": "number", "minimum": 0, "exclusiveMaximum": 100},
    "street of any other properties": {"type": "object", "properties": STREET},
    "street of no other properties": {"type": "object", "properties": STREET, "additionalProperties": False},
    "street of other texts": {"type": "object", "properties": STREET, "additionalProperties": TEXT},
    "names by pattern": {
        "type": "object",
        "patternProperties": {"^S_": {"type": "string"}, "^I_": {"type": "integer"}},
    },
    "names by pattern and no others": {
        "type": "object",
        "properties": {"builtin": {"type": "number"}},
        "patternProperties": {"^S_": {"type": "string"}, "^I_": {"type": "integer"}},
        "additionalProperties": TEXT,
    },
    "required names": _object("name email", name=TEXT, email=TEXT, address=TEXT, telephone=TEXT),
    "list of numbers": {"type": "array", "items": {"type": "number"}},
    "tuple": TUPLE,
    "tuple without more": TUPLE | {"items": False},
    "tuple and texts": TUPLE | {"items": TEXT},
    "two or three items": {"type": "array", "minItems": 2, "maxItems": 3},
    "colours": {"enum": ["red", "amber", "green", None, 42]},
    "country": {"properties": {"country": {"const": "United States of America"}}},
    "annotations": {"title": "Match anything", "default": "Default value", "examples": ["Anything", 4035]},
    "image": {"type": "string", "contentEncoding": "base64", "contentMediaType": "image/png"},
    "text or number": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "number", "minimum": 0}]},
    "short text by two schemas": {"allOf": [{"type": "string"}, {"maxLength": 5}]},
    "names and addresses": {
        "$defs": {"name": {"type": "string"}},
        **_object("first_name last_name", first_name={"$ref": "#/$defs/name"}, last_name={"$ref": "#/$defs/name"}),
    },
    "person with children": {
        "type": "object",
        "properties": {"name": TEXT, "children": {"type": "array", "items": {"$ref": "#"}}},
    },
    "definition by anchor": {
        "type": "object",
        "properties": {"shipping": {"$ref": "#address"}},
        "$defs": {"address": {"$anchor": "address", **_object("city", city=TEXT)}},
    },
    "extended address": {
        "allOf": [{"$ref": "#/$defs/address"}],
        "properties": {"type": {"enum": ["residential", "business"]}},
        "required": ["type"],
        "$defs": {"address": _object("street_address city", street_address=TEXT, city=TEXT, state=TEXT)},
    },
    # core and validation
    "definitions of core": {
        "type": "array",
        "items": {"$ref": "#/$defs/positiveInteger"},
        "$defs": {"positiveInteger": {"type": "integer", "exclusiveMinimum": 0}},
    },
    "everything": {},
    "tree without extension": {
        "$id": "https://example.com/tree",
        **_object(data=True, children={"type": "array", "items": {"$ref": "#"}}),
    },
    "token in a text": {
        "type": "string",
        "contentMediaType": "application/jwt",
        "contentSchema": {"type": "array", "minItems": 2, "prefixItems": [{"const": {"typ": "JWT", "alg": "HS256"}}]},
    },
    "expression": {
        "$ref": "#/$defs/expression",
        "$defs": {
            "expression": {
                "anyOf": [
                    {"type": "number"},
                    _object("left operator right", operator={"enum": ["+", "-"]}, left={"$ref": "#/$defs/expression"})
                    | {"additionalProperties": {"$ref": "#/$defs/expression"}},
                ]
            }
        },
    },
}  # fmt: skip

REFUSED: dict[str, tuple[Schema, str]] = {
    "conditional postcode": (
        _object(country={"enum": ["United States of America", "Canada"]})
        | {
            "if": {"properties": {"country": {"const": "United States of America"}}},
            "then": {"properties": {"postal_code": {"pattern": "[0-9]{5}(-[0-9]{4})?"}}},
            "else": {"properties": {"postal_code": {"pattern": "[A-Z][0-9][A-Z] [0-9][A-Z][0-9]"}}},
        },
        r'^constraint\.json_schema: .*"else", "if", "then"',
    ),
    "membership": (
        _page("conditional")
        | _object(isMember={"type": "boolean"}, membershipNumber=TEXT)
        | {"required": ["isMember"], "if": {"properties": {"isMember": {"const": True}}}, "else": {}},
        '"if"',
    ),
    "credit card": (
        _object("name", name=TEXT, credit_card=NUMBER, billing_address=TEXT)
        | {"dependentRequired": {"credit_card": ["billing_address"]}},
        '"dependentRequired"',
    ),
    "credit card by schema": (
        _object("name", name=TEXT, credit_card=NUMBER)
        | {"dependentSchemas": {"credit_card": {"required": ["billing_address"]}}},
        '"dependentSchemas"',
    ),
    "names of identifiers": (
        {"type": "object", "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"}},
        '"propertyNames"',
    ),
    "unevaluated properties": (
        {"allOf": [_object("city", city=TEXT)], "properties": {"type": TEXT}, "unevaluatedProperties": False},
        '"unevaluatedProperties"',
    ),
    "unevaluated items": (
        {"prefixItems": [TEXT, NUMBER], "unevaluatedItems": False},
        '"unevaluatedItems"',
    ),
    "contains": ({"type": "array", "contains": {"type": "number"}}, '"contains"'),
    "contains a few": (
        {"type": "array", "contains": {"type": "number"}, "minContains": 2, "maxContains": 3},
        '"contains"',
    ),
    "unique items": ({"type": "array", "uniqueItems": True}, '"uniqueItems"'),
    "no text": ({"not": {"type": "string"}}, '"not"'),
    "multiples of five or three": (
        {"oneOf": [{"type": "number", "multipleOf": 5}, {"type": "number", "multipleOf": 3}]},
        "oneOf constraints are not supported",
    ),
    "two or three properties": (
        {"type": "object", "minProperties": 2, "maxProperties": 3},
        "minProperties: 2 distinct names",
    ),
    "extensible tree": (
        _page("tree")
        | {"$dynamicAnchor": "node"}
        | _object(data=True, children={"type": "array", "items": {"$dynamicRef": "#node"}}),
        r'json_schema(\.properties\.children\.items)?: .*"\$dynamic(Ref|Anchor)"',
    ),
    "definitions of another document": (
        _object(address={"$ref": "https://example.com/schemas/address"}),
        r"properties\.address: .*https://example\.com/schemas/address",
    ),
    "file system": (
        _page("fstab") | {"type": "object", "patternProperties": {"^(/[^/]+)+$": {"$ref": "/entry"}}},
        "patternProperties",
    ),
    "device types": (
        _page("device")
        | {"oneOf": [_object(deviceType=TEXT), _object(deviceType=TEXT, brand=TEXT)]},
        "oneOf",
    ),
    "nothing": ({"allOf": [{"type": "string"}, {"type": "number"}]}, "Unsatisfiable schema: incompatible types"),
}  # fmt: skip

"""Tokens with a vendor's prefix or shape: one row for each, and one pattern for all."""

import re
from typing import Final

# Start of a token: not inside a word, unless the letter before belongs to an escape sequence as in
# repr("\neyJ...") or "%20eyJ...".
START: Final = r"(?<![A-Za-z0-9_-])"
START_AFTER_ESCAPE: Final = r"(?:(?<=\\[nrt])|(?<=%[0-9A-Fa-f][0-9A-Fa-f]))"

_HEX: Final = "[0-9a-f]"
_UUID: Final = rf"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}"
_END: Final = "(?![A-Za-z0-9])"

# (vendor, what is kept, what is removed). Case matters. A row is used only in texts with a word
# of LONG_WORD's length, so each must contain one.
VENDORS: Final = (
    # Three parts, or two if the rest was cut off, or five if encrypted.
    ("jwt", "", r"eyJ[\w-]{5,}+\.(?:eyJ[\w-]++(?:\.[\w-]++)*+|[\w-]*+(?:\.[\w-]++)++)"),
    ("mapbox", r"sk\.", r"eyJ[\w-]{20,}+\.[\w-]{10,}+"),
    ("adafruit", "aio_", r"[A-Za-z0-9]{28}"),
    ("age", "AGE-SECRET-KEY-", r"1[A-Z0-9]{50,}+"),
    ("airtable", "pat", rf"[A-Za-z0-9]{{14}}\.{_HEX}{{64}}"),
    ("alibaba", "LTAI", rf"[A-Za-z0-9]{{12,20}}{_END}"),
    ("atlassian", "AT[AC]TT3x", r"[\w-]{20,}+(?:=[A-F0-9A-Z]{8})?"),
    ("bitbucket", "ATBB", r"[A-Za-z0-9]{24,}+"),
    ("aws id", "AKIA|ASIA|ABIA|ACCA", rf"[A-Z0-9]{{16}}{_END}"),
    ("aws bedrock", "ABSK", r"[A-Za-z0-9+/]{60,}+={0,2}"),
    ("aws mws", r"amzn\.mws\.", _UUID),
    ("azure client secret", "", r"[\w~.-]{3}\dQ~[\w~.-]{31,34}"),
    ("azure devops", "", rf"(?=[a-z]*\d)[a-z0-9]{{52}}{_END}"),
    ("brevo", "xkeysib-", rf"{_HEX}{{64}}-[A-Za-z0-9]{{16}}"),
    ("cloudflare", r"v1\.0-", rf"{_HEX}{{24}}-{_HEX}{{100,}}+"),
    ("databricks", "dapi", rf"{_HEX}{{32}}(?:-\d)?{_END}"),
    ("digitalocean", "do[opr]_v1_", rf"{_HEX}{{32,}}+"),
    ("discord", "", r"[MNO][\w-]{23,25}\.[\w-]{6}\.[\w-]{27,}+"),
    ("discord", r"mfa\.", r"[\w-]{60,}+"),
    ("discord webhook", r"(?:discord|discordapp)\.com/api/webhooks/\d{1,24}/", r"[\w-]{40,}+"),
    ("docker", "dckr_(?:pat|oat)_", r"[\w-]{20,}+"),
    ("doppler", r"dp\.[a-z]{2,5}\.(?:[a-z0-9_-]{2,35}\.)?", r"[A-Za-z0-9]{40,44}"),
    ("dropbox", r"sl\.", r"[\w-]{100,}+"),
    ("dynatrace", r"dt0[a-z]\d\d\.", r"[A-Z0-9]{24}\.[A-Z0-9]{64}"),
    ("facebook, square", "EAA", r"[\w-]{50,}+"),
    ("figma", "figd_", r"[\w-]{20,}+"),
    ("firebase", "AAAA", r"[\w-]{7}:APA91b[\w-]{100,}+"),
    ("fly", r"fm\d_", r"[A-Za-z0-9+/=,_-]{40,}+"),
    ("github", "gh[opsur]_", r"[A-Za-z0-9]{20,}+"),
    ("github", "github_pat_", r"\w{20,}+"),
    ("gitlab", "gl(?:pat|dt|rt|ptt|ft|cbt|imt|oas|soat|agent|ffct)-", r"[\w-]{16,}+"),
    ("gitlab runner", "GR1348941", r"[\w-]{20,}+"),
    ("google api key", "AIza", r"[\w-]{30,}+"),
    ("google access", r"ya29\.", r"[\w-]{20,}+"),
    ("google client", "GOCSPX-", r"[\w-]{20,}+"),
    ("google refresh", "1//", r"0[\w-]{30,}+"),
    ("grafana", "glsa_", rf"[A-Za-z0-9]{{32}}_{_HEX}{{8}}"),
    ("grafana cloud", "glc_", r"eyJ[A-Za-z0-9+/]{20,}+={0,2}"),
    ("grafana old", "eyJrIjoi", r"[A-Za-z0-9]{20,}+={0,2}"),
    ("groq", "gsk_", r"[A-Za-z0-9]{20,}+"),
    ("heroku", "HRKU-", r"[\w-]{30,}+"),
    ("hubspot", r"pat-[a-z]{2,3}\d-", _UUID),
    ("huggingface", "hf_|api_org_", r"[A-Za-z0-9]{30,}+"),
    ("jfrog", "AKCp|cmVmdGtu", r"[A-Za-z0-9]{50,}+"),
    ("linear", "lin_(?:api|oauth)_", r"[A-Za-z0-9]{30,}+"),
    ("mailchimp", "", rf"{_HEX}{{32}}-us\d{{1,2}}{_END}"),
    ("mailgun", "(?:pub)?key-", rf"{_HEX}{{32}}{_END}"),
    ("mailgun", "", rf"{_HEX}{{32}}-{_HEX}{{8}}-{_HEX}{{8}}{_END}"),
    ("netlify", "nf[copu]_", r"[A-Za-z0-9]{30,}+"),
    ("new relic", "NR(?:AK|II|AA|RA|JS)-", r"[\w-]{20,}+"),
    ("notion", "ntn_", r"[A-Za-z0-9]{40,}+"),
    ("notion", "secret_", r"[A-Za-z0-9]{40,}+"),
    ("npm", "npm_", r"[A-Za-z0-9]{30,}+"),
    ("onepassword", "ops_", r"eyJ[\w-]{40,}+"),
    # The digit tells keys from long hyphenated names such as "sk-estimator-doc-link-fitted".
    ("openai, anthropic", "sk-", r"(?=[A-Za-z_-]{0,64}\d)[\w-]{20,}+"),
    (
        "password hash",
        r"\$(?:[1567y]|2[abxy]|argon2\w{1,2}|scrypt)\$(?:\d\d\$)?",
        r"[\w./$,=+]{20,}+",
    ),
    ("perplexity", "pplx-", r"[A-Za-z0-9]{30,}+"),
    ("plaid", "access-(?:production|development|sandbox)-", _UUID),
    ("planetscale", "pscale_(?:tkn|pw|oauth)_", r"[\w.-]{30,}+"),
    ("postman", "PMAK-", rf"{_HEX}{{24}}-{_HEX}{{34}}"),
    ("prefect", "pn[ub]_", r"[A-Za-z0-9]{36}"),
    ("pulumi", "pul-", rf"{_HEX}{{40}}"),
    ("pypi", "pypi-", r"AgE[\w-]{20,}+"),
    ("razorpay", "rzp_(?:live|test)_", r"[A-Za-z0-9]{14,}+"),
    ("replicate", "r8_", r"[A-Za-z0-9]{30,}+"),
    ("rubygems", "rubygems_", rf"{_HEX}{{40,}}+"),
    ("sendgrid", r"SG\.", r"[\w-]{16,}+\.[\w-]{16,}+"),
    ("sentry", "sntry[su]_", r"[A-Za-z0-9+/=_-]{40,}+"),
    ("shopify", "shp(?:at|ss|ca|pa|tka)_", r"[0-9A-Fa-f]{32}"),
    ("slack", r"xox[a-z](?:\.xox[a-z])?-|xapp-", r"[A-Za-z0-9-]{8,}+"),
    ("slack", r"hooks\.slack\.com/(?:services|workflows|triggers)/", r"[\w/]{16,}+"),
    ("square", "sq0[a-z]{3}-", r"[\w-]{20,}+"),
    ("stripe", "[sr]k_(?:live|test)_", r"[A-Za-z0-9]{10,}+"),
    ("stripe webhook", "whsec_", r"[A-Za-z0-9+/=]{16,}+"),
    ("supabase", "sb[ps]_", rf"{_HEX}{{40}}"),
    ("teams", r"webhook\.office\.com/webhookb2/", r"[\w@/-]{40,}+"),
    ("telegram", r"(?:bot)?\d{8,10}:", r"AA[\w-]{32,}+"),
    ("tencent", "AKID", rf"[A-Za-z0-9]{{32}}{_END}"),
    ("terraform", "", r"[A-Za-z0-9]{14}\.atlasv1\.[\w-]{60,}+"),
    ("twilio key", "SK", rf"{_HEX}{{32}}{_END}"),
    ("twilio token", rf"AC{_HEX}{{32}}:", rf"{_HEX}{{32}}{_END}"),
    ("twitter", "A{20,24}", r"[A-Za-z0-9%]{40,}+"),
    ("typeform", "tfp_", r"[\w-]{40,}+"),
    ("vault", r"hv[sbr]\.", r"[\w-]{20,}+"),
    ("xai", "xai-", r"[A-Za-z0-9]{60,}+"),
)

# Each alternative has exactly one group: what is removed. The lookahead spares short words.
_ANY: Final = (
    r"(?=\S{14})(?:" + "|".join(f"(?:{kept})({removed})" for _, kept, removed in VENDORS) + ")"
)
TOKENS: Final = re.compile(START + _ANY, re.ASCII)
TOKENS_AFTER_ESCAPE: Final = re.compile(START_AFTER_ESCAPE + _ANY, re.ASCII)
LONG_WORD: Final = re.compile(r"[A-Za-z0-9_-]{14}", re.ASCII)

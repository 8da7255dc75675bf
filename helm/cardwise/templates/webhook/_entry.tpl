{{/* What all entries of both webhook configurations have in common. No caBundle: the webhook writes it itself. */}}
{{- define "cardwise.webhook.entry" -}}
admissionReviewVersions: [v1]
sideEffects: None
matchPolicy: Equivalent
failurePolicy: {{ .failurePolicy | default "Fail" }}
timeoutSeconds: {{ .timeoutSeconds | default .root.Values.webhook.timeoutSeconds }}
clientConfig:
  {{- if .root.Values.webhook.url }}
  url: {{ .root.Values.webhook.url }}{{ .path }}
  {{- else }}
  service:
    name: cardwise-webhook
    namespace: {{ .root.Values.namespace.name }}
    port: 443
    path: {{ .path }}
  {{- end }}
{{- end }}

{{- define "cardwise.webhook.podConditions" -}}
- name: not-exempt
  expression: "!(request.namespace in {{ include "cardwise.cel.list" .Values.webhook.exemptNamespaces }})"
- name: not-a-mirror
  expression: {{ include "cardwise.cel.notMirror" . | quote }}
{{- end }}

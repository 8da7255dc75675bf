{{/*
A ValidatingAdmissionPolicyBinding for all namespaces, and the beginning of the policy, up to its spec. `name`: the name
of both. `params`: the reference to the object that the policy compares with.
*/}}
{{- define "cardwise.policy" }}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: {{ .name }}.cardwise.dev
  labels: {{- include "cardwise.labels" (dict "root" .root "component" "policies") | nindent 4 }}
spec:
  policyName: {{ .name }}.cardwise.dev
  {{- with .params }}
  paramRef: {{- toYaml . | nindent 4 }}
  {{- end }}
  validationActions: [Deny]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata:
  name: {{ .name }}.cardwise.dev
  labels: {{- include "cardwise.labels" (dict "root" .root "component" "policies") | nindent 4 }}
spec:
  failurePolicy: Fail
{{- end }}

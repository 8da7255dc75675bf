{{/* A policy of this name that refuses everywhere, by its binding, up to the beginning of its spec. `params`: of the
object that it compares with. */}}
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

{{/*
What the cluster has that decides whether an installation works, as JSON: {} where helm does not look (`helm template`,
GitOps). It is looked up once and kept in `.Values.seen`: lists of nodes and pods can be long.

  runtimeClasses   names of all
  nvidia           names of NVIDIA's RuntimeClasses
  controlPlane     names of nodes with the labels of scheduler.controlPlaneSelector
  schedulers       names of mirrors of kube-scheduler's static pods, as kubeadm makes them
  labelled         how many nodes have the labels by which the parts on nodes find them
  unlabelled       other nodes that offer nvidia.com/gpu
  wired            "true" where a kube-scheduler has been changed by files/kubeadm.py: its mirror says so
  enforced         the profile that Pod Security enforces in our namespace, "" where no label says one
*/}}
{{- define "cardwise.cluster" -}}
{{- if not (hasKey .Values "seen") }}
{{- $seen := dict }}
{{- if lookup "v1" "Namespace" "" "kube-system" }}
{{- $classes := list }}
{{- $nvidia := list }}
{{- range (lookup "node.k8s.io/v1" "RuntimeClass" "" "").items }}
{{- $classes = append $classes .metadata.name }}
{{- if contains "nvidia" (printf "%s %s" .metadata.name .handler) }}{{ $nvidia = append $nvidia .metadata.name }}{{ end }}
{{- end }}
{{- $controlPlane := list }}
{{- $labelled := 0 }}
{{- $unlabelled := list }}
{{- $gpu := include "cardwise.nodes.labels" . | fromJson }}
{{- range $node := (lookup "v1" "Node" "" "").items }}
{{- $labels := $node.metadata.labels | default dict }}
{{- if eq (include "cardwise.labelled" (dict "labels" $labels "selector" $.Values.scheduler.controlPlaneSelector)) "true" }}
{{- $controlPlane = append $controlPlane $node.metadata.name }}
{{- end }}
{{- $is := false }}
{{- if $.Values.nodes.selector }}
{{- $is = eq (include "cardwise.labelled" (dict "labels" $labels "selector" $.Values.nodes.selector)) "true" }}
{{- else }}
{{- range $key, $values := $gpu }}
{{- if and (hasKey $labels $key) (or (not $values) (has (get $labels $key) $values)) }}{{ $is = true }}{{ end }}
{{- end }}
{{- end }}
{{- if $is }}
{{- $labelled = add1 $labelled }}
{{- else if ne (dig "status" "capacity" "nvidia.com/gpu" "0" $node | toString) "0" }}
{{- $unlabelled = append $unlabelled $node.metadata.name }}
{{- end }}
{{- end }}
{{- $schedulers := list }}
{{- $wired := "" }}
{{- range (lookup "v1" "Pod" "kube-system" "").items }}
{{- $annotations := .metadata.annotations | default dict }}
{{- if hasKey $annotations "cardwise-former-config" }}{{ $wired = "true" }}{{ end }}
{{- if and (hasPrefix "kube-scheduler-" .metadata.name) (hasKey $annotations "kubernetes.io/config.mirror") }}
{{- $schedulers = append $schedulers .metadata.name }}
{{- end }}
{{- end }}
{{- $own := lookup "v1" "Namespace" "" (include "cardwise.namespace" .) }}
{{- $seen = dict "runtimeClasses" $classes "nvidia" $nvidia "controlPlane" $controlPlane "schedulers" $schedulers "labelled" $labelled "unlabelled" $unlabelled "wired" $wired "enforced" (dig "metadata" "labels" "pod-security.kubernetes.io/enforce" "" $own) }}
{{- end }}
{{- $_ := set .Values "seen" $seen }}
{{- end }}
{{- toJson .Values.seen }}
{{- end }}

{{/* "true" if the node's `labels` have all of the `selector`. */}}
{{- define "cardwise.labelled" -}}
{{- $is := true }}
{{- range $key, $value := .selector }}
{{- if or (not (hasKey $.labels $key)) (ne (get $.labels $key | toString) $value) }}{{ $is = false }}{{ end }}
{{- end }}
{{- $is }}
{{- end }}

{{/*
The RuntimeClass of the parts on nodes; "" for the runtime's default. auto: NVIDIA's, if
helm sees one; also "" if it sees several, none is called nvidia, and none is chosen (templates/checks.yaml refuses that).
*/}}
{{- define "cardwise.nodes.runtimeClass" -}}
{{- if ne .Values.nodes.runtimeClass "auto" }}
{{- .Values.nodes.runtimeClass }}
{{- else if not .Values.nodes.simulatedGPUs }}
{{- $classes := dig "nvidia" list (include "cardwise.cluster" . | fromJson) }}
{{- if has "nvidia" $classes }}nvidia{{ else if eq (len $classes) 1 }}{{ first $classes }}{{ end }}
{{- end }}
{{- end }}

{{/* kube-scheduler's image of the API server's version, without what providers add to it (v1.37.2-gke.100, v1.37.2+k3s1). */}}
{{- define "cardwise.scheduler.image" -}}
registry.k8s.io/kube-scheduler:{{ regexFind "^v[0-9]+\\.[0-9]+\\.[0-9]+" .Capabilities.KubeVersion.Version }}
{{- end }}

{{/* Which scheduler.mode fits the cluster, as far as helm sees it. */}}
{{- define "cardwise.scheduler.fits" -}}
{{- $seen := include "cardwise.cluster" . | fromJson }}
{{- if not $seen }}
{{- else if and $seen.controlPlane $seen.schedulers }}
{{- printf "\nHere kube-scheduler is a static pod (%s), as kubeadm makes it: write scheduler.mode=kubeadm" (join ", " $seen.schedulers) }}
{{- else }}
{{- $why := ternary "no node is visible as a control plane of kubeadm" "kube-scheduler is no static pod in kube-system" (empty $seen.controlPlane) }}
{{- printf "\nHere %s, so kubeadm cannot work: write scheduler.mode=own,scheduler.image=%s" $why (include "cardwise.scheduler.image" .) }}
{{- end }}
{{- end }}

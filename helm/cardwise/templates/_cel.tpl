{{/*
CEL that several objects share. In CEL, because it is evaluated by the API server itself: a pod that is none of ours
never depends on the webhook. Lists from the values are rendered as CEL lists; the schema keeps quotes out of them.
*/}}
{{- define "cardwise.cel.list" -}}
[{{- range $i, $item := . }}{{ if $i }}, {{ end }}'{{ $item }}'{{ end -}}]
{{- end }}

{{/*
The limits and requests of all containers of the pod spec `.` as text, in which each key stands as "key": between other
signs than a name has, and an amount has no slash. As text, since a tenant may write thousands of both: see
cardwise.cel.keys. dyn: the type checker of policies knows no limits. null: what of a template without containers, which
Kubernetes refuses later.
*/}}
{{- define "cardwise.cel.amounts" -}}
'%s'.format([[
{{- range $i, $field := list "containers" "initContainers" }}{{ if $i }}, {{ end -}}
(has({{ $ }}.{{ $field }}) && dyn({{ $ }}.{{ $field }}) != null ? dyn({{ $ }}.{{ $field }}) : []).map(c, [c.?resources.?limits.orValue({}), c.?resources.?requests.orValue({})])
{{- end }}]])
{{- end }}

{{/* Whether for the pod spec `spec` the test `holds` of the text `amounts`: see cardwise.cel.amounts. */}}
{{- define "cardwise.cel.amountsAre" -}}
[{{ include "cardwise.cel.amounts" .spec }}].exists(amounts, {{ .holds }})
{{- end }}

{{/* Whether the `amounts` have a resource of those that users ask for. Ten characters are looked for first: the cost limit
counts each ten. */}}
{{- define "cardwise.cel.haveShares" -}}
amounts.contains('"aliyun.co') && (amounts.contains('"aliyun.com/gpu-mem":') || amounts.contains('"aliyun.com/gpu-count":') || amounts.contains('"aliyun.com/gpu-core.percentage":'))
{{- end }}

{{/* Whether the `amounts` have a resource of our own domain. */}}
{{- define "cardwise.cel.haveOwn" -}}
amounts.contains('"cardwise.') && amounts.contains('"cardwise.dev/')
{{- end }}

{{/*
Whether the `amounts` have a bare name, which Kubernetes would refuse: it has no domain and is none of its own. The
webhook knows which of them are ResourceClasses.
*/}}
{{- define "cardwise.cel.haveBare" -}}
!amounts.findAll('"[^/"]*":').join('')
{{- range list "cpu" "memory" "storage" "ephemeral-storage" }}.replace('"{{ . }}":', ''){{ end -}}
.matches('^("hugepages-[^"]*":)*$')
{{- end }}

{{/* Whether the `amounts` have a key that the webhook rewrites, in any spelling. */}}
{{- define "cardwise.cel.haveRewritten" -}}
({{ include "cardwise.cel.haveShares" . }}) || ({{ include "cardwise.cel.haveOwn" . }}) || {{ include "cardwise.cel.haveBare" . }}
{{- if eq .Values.webhook.nvidiaGpu "take" }} || amounts.contains('"nvidia.com/gpu":'){{ end }}
{{- end }}

{{/* Whether the resource `k` is one that users ask for, or any of our own domain. */}}
{{- define "cardwise.cel.ourResource" -}}
k in ['aliyun.com/gpu-mem', 'aliyun.com/gpu-count', 'aliyun.com/gpu-core.percentage'] || k.startsWith('cardwise.dev/')
{{- end }}

{{/* Whether the resource `k` is a bare name: as cardwise.cel.haveBare. */}}
{{- define "cardwise.cel.bareName" -}}
!k.contains('/') && !(k in ['cpu', 'memory', 'storage', 'ephemeral-storage']) && !k.startsWith('hugepages-')
{{- end }}

{{/* The same for a key of a ResourceQuota's spec.hard, where Kubernetes has more names of its own. */}}
{{- define "cardwise.cel.bareQuotaName" -}}
{{ include "cardwise.cel.bareName" . }} && !k.startsWith('requests.') && !k.startsWith('limits.') && !(k in ['pods', 'services', 'secrets', 'configmaps', 'persistentvolumeclaims', 'replicationcontrollers', 'resourcequotas', 'services.loadbalancers', 'services.nodeports'])
{{- end }}

{{/* Whether the key `k` of a ResourceQuota's spec.hard is about a resource of ours, and not what it is rewritten to. */}}
{{- define "cardwise.cel.ourQuotaName" -}}
k.endsWith('aliyun.com/gpu-mem') || k.endsWith('aliyun.com/gpu-count') ||
k in ['aliyun.com/gpu-core.percentage', 'limits.aliyun.com/gpu-core.percentage', 'requests.cardwise.dev/place', 'requests.cardwise.dev/bind'] ||
k.startsWith('cardwise.dev/') || k.startsWith('limits.cardwise.dev/')
{{- if eq .Values.webhook.nvidiaGpu "take" }} ||
k in ['nvidia.com/gpu', 'requests.nvidia.com/gpu', 'limits.nvidia.com/gpu']
{{- end }}
{{- end }}

{{/* All amounts of the LimitRange `object` as text, as cardwise.cel.amounts. */}}
{{- define "cardwise.cel.limitRangeAmounts" -}}
'%s'.format([object.?spec.?limits.orValue([])])
{{- end }}

{{/* Whether the ResourceQuota `object` has a key that we rewrite. Of those that may be one 64 are looked at, and of more the
webhook is asked. */}}
{{- define "cardwise.cel.quotaIsOurs" -}}
['%s'.format([object.?spec.?hard.orValue({})])].exists(amounts,
  [amounts.findAll('"[^/"]*":', 64) + (amounts.contains('aliyun.com') || amounts.contains('cardwise.d') || amounts.contains('nvidia.com') ?
    amounts.findAll('"[^"/]*(aliyun[.]com|cardwise[.]dev|nvidia[.]com)/[^"]*":', 64) : [])].exists(found,
    found.size() >= 64 || found.map(k, k.split('"')[1]).exists(k,
    {{- include "cardwise.cel.ourQuotaName" . | nindent 4 }} ||
    ({{ include "cardwise.cel.bareQuotaName" . }}))))
{{- end }}

{{/* Whether the pod spec `spec` has a container with a limit or request `k` for which `key` holds, and for which `and`
holds, if there is one, of the container `c`. It costs the square of their number, so it stands behind a test of
cardwise.cel.amounts that few pods pass: of pods that ask for a share the webhook limits both (webhook/server/sizes.py). */}}
{{- define "cardwise.cel.containersHave" -}}
{{- $spec := .spec -}}{{- $key := .key -}}{{- $and := .and -}}
(
{{- range $i, $field := list "containers" "initContainers" }}
  {{- if $i }} ||{{ end }}
  (has({{ $spec }}.{{ $field }}) && dyn({{ $spec }}.{{ $field }}) != null && dyn({{ $spec }}.{{ $field }}).exists(c, has(c.resources) && {{ with $and }}{{ . }} && {{ end }}(
    (has(c.resources.limits) && c.resources.limits.exists(k, {{ $key }})) ||
    (has(c.resources.requests) && c.resources.requests.exists(k, {{ $key }})))))
{{- end }})
{{- end }}

{{/* Whether the pod `object` asks for a resource of ours anywhere, as it does after the webhook. The markers that bring
members of gangs to the extender are none. */}}
{{- define "cardwise.cel.asks" -}}
{{- $more := "amounts.split('\"cardwise.dev/').size() > amounts.split('\"cardwise.dev/place\":').size() + amounts.split('\"cardwise.dev/bind\":').size() - 1" -}}
{{- $asked := printf "(%s) || (%s && %s)" (include "cardwise.cel.haveShares" .) (include "cardwise.cel.haveOwn" .) $more -}}
{{ include "cardwise.cel.amountsAre" (dict "spec" "object.spec" "holds" $asked) }}
{{- end }}

{{/* Whether the pod or template `of` names a gang that is ours: for a scheduler that asks the extender. */}}
{{- define "cardwise.cel.namesGang" -}}
{{- $of := .of -}}
(has({{ $of }}.metadata) &&
 (!has({{ $of }}.spec) || !has({{ $of }}.spec.schedulerName) || {{ $of }}.spec.schedulerName in {{ include "cardwise.cel.list" (include "cardwise.gangSchedulers" .root | fromJsonArray) }}) &&
 ((has({{ $of }}.metadata.annotations) && ['scheduling.k8s.io/group-name', 'scheduling.k8s.io/group-pod-num'].exists(k, k in {{ $of }}.metadata.annotations)) ||
  (has({{ $of }}.metadata.labels) && ['scheduling.k8s.io/group-name', 'scheduling.k8s.io/group-pod-num', 'scheduling.x-k8s.io/pod-group'].exists(k, k in {{ $of }}.metadata.labels))))
{{- end }}

{{/* Whether the pod `.` has the gate of our gangs. No loop over the gates: see cardwise.cel.keys. */}}
{{- define "cardwise.cel.gated" -}}
(has({{ . }}.spec.schedulingGates) && 'cardwise.dev/gang' in {{ . }}.spec.schedulingGates.map(g, g.name))
{{- end }}

{{/* Whether the pod `object` names a gang, or carries what the webhook gives to members alone. */}}
{{- define "cardwise.cel.inGang" -}}
({{ include "cardwise.cel.namesGang" (dict "root" . "of" "object") }} ||
 (has(object.metadata.labels) && 'cardwise.dev/gang' in object.metadata.labels) ||
 {{ include "cardwise.cel.gated" "object" }})
{{- end }}

{{/* Whether the pod `object` asks for a card in any of the spellings that the webhook rewrites, or is in a gang. */}}
{{- define "cardwise.cel.isOurs" -}}
[{{ include "cardwise.cel.amounts" "object.spec" }}].exists(amounts,
{{ include "cardwise.cel.isOursBy" . }})
{{- end }}

{{/* The same by the `amounts`, for expressions that have them already. */}}
{{- define "cardwise.cel.isOursBy" -}}
({{ include "cardwise.cel.annotated" "cardwise.dev/class" }} ||
{{ include "cardwise.cel.inGang" . }} ||
{{ include "cardwise.cel.haveRewritten" . }})
{{- end }}

{{/*
Whether the pod `object` has something that the webhook rewrites and has not rewritten: a container that asks for
something and has no share slot, one beside it that is not told to see no card, a gang's name without its label and gate,
or a class that no container has got. Markers stand without a slot in a gang's member that asks for nothing.
*/}}
{{- define "cardwise.cel.unwritten" -}}
{{- $gated := include "cardwise.cel.gated" "object" -}}
{{- $labelled := "(has(object.metadata.labels) && 'cardwise.dev/gang' in object.metadata.labels)" -}}
{{- $key := printf "((%s) && !(k in ['cardwise.dev/place', 'cardwise.dev/bind'] && %s)) || (%s)" (include "cardwise.cel.ourResource" .) $gated (include "cardwise.cel.bareName" .) -}}
{{- if eq .Values.webhook.nvidiaGpu "take" }}{{ $key = printf "%s || k == 'nvidia.com/gpu'" $key }}{{ end -}}
{{- $slot := "amounts.contains('\"cardwise.dev/share\":')" -}}
[{{ include "cardwise.cel.amounts" "object.spec" }}].exists(amounts,
(({{ include "cardwise.cel.haveRewritten" . }}) && {{ include "cardwise.cel.containersHave" (dict "spec" "object.spec" "key" $key "and" "!(has(c.resources.limits) && 'cardwise.dev/share' in c.resources.limits)") }}) ||
({{ $slot }} && [object.spec.containers, has(object.spec.initContainers) ? object.spec.initContainers : []].exists(list,
  list.exists(c, !(has(c.env) && c.env.exists(e, e.name == 'NVIDIA_VISIBLE_DEVICES'))))) ||
{{ $labelled }} != {{ $gated }} ||
({{ include "cardwise.cel.namesGang" (dict "root" . "of" "object") }} && !{{ $gated }}) ||
({{ include "cardwise.cel.annotated" "cardwise.dev/class" }} && !{{ $slot }}))
{{- end }}

{{/*
Whether the `amounts` have a resource, of whatever domain, that is about GPUs by its name. As
cardwise/core/api/lookalikes.py is_like_gpu: each key has a line of its own then. It takes bare names too: whoever asks
this asks it behind what refuses those, which are none of Kubernetes'.
*/}}
{{- define "cardwise.cel.looksLikeGpu" -}}
(amounts.contains('gpu') || amounts.contains('cuda') || amounts.contains('"aliyun.co') || amounts.contains('"nvidia.co') || amounts.contains('"cardwise.')) &&
amounts.replace('"', '\n').matches(r'(?m)gpu|cuda|^aliyun\.com/|^nvidia\.com/|^cardwise\.dev/')
{{- end }}

{{/* The same for `amounts` of a ResourceQuota or LimitRange, where a name may stand behind `requests.` or `limits.`. */}}
{{- define "cardwise.cel.quotaLooksLikeGpu" -}}
(amounts.contains('gpu') || amounts.contains('cuda') || amounts.contains('aliyun.com') || amounts.contains('nvidia.com') || amounts.contains('cardwise.d')) &&
amounts.replace('"', '\n').matches(r'(?m)gpu|cuda|^(requests\.|limits\.)?(aliyun\.com|nvidia\.com|cardwise\.dev)/')
{{- end }}

{{/*
Whether the `annotations` or `labels` of a pod or template have a key that is meant for Cardwise, and is none that it
reads: misspelled, or of another GPU sharer. As cardwise/core/api/lookalikes.py suggest_pod_key. What users may write thousands of
is searched as text, and a few of what is found are looked at: it is for warnings.
*/}}
{{- define "cardwise.cel.keysAboutUs" -}}
[{{ .annotations }}, {{ .labels }}].exists(keys,
{{ include "cardwise.cel.says" (dict "value" "keys" "words" (list "ardwise" "ARDWISE" "gpu" "hami.io/" "scheduling")) }} &&
{{ include "cardwise.cel.keys" "keys" }}.findAll(r'(?m)^.*(?:(?i:cardwise)|^gpu-(fraction|memory)|/(no)?use-gpu|^hami\.io/|^scheduling\.(x-)?k8s\.io/(pod-?)?(group|gang)|^pod-group\.scheduling\.|^gang\.scheduling\.).*', 64).exists(k,
!k.startsWith('cardwise.dev/') &&
!(k in ['scheduling.k8s.io/group-name', 'scheduling.k8s.io/group-pod-num', 'scheduling.x-k8s.io/pod-group'])))
{{- end }}

{{/*
Whether the update of a pod brings a spelling that is stored otherwise: of the resources that we rewrite when a pod is
created, or gpu-mem with a unit; where bare numbers count GiB, also gpu-mem that no stored container has. Or whether it lacks
a toleration that we have added: lists of these are replaced as a whole. Kubernetes would refuse both, so nothing that it
takes is kept waiting by us.
*/}}
{{- define "cardwise.cel.respelled" -}}
{{- $amount := "string(c.resources.?limits[?k].orValue('1'))" -}}
{{- $spelled := printf "!%s.matches('^[0-9]+[kMGTPE]?$')" $amount -}}
{{- if eq (include "cardwise.webhook.unit" .) "GiB" }}{{ $spelled = printf "!((oldObject.spec.containers + oldObject.spec.?initContainers.orValue([])).exists(o, string(o.?resources.?limits[?k].orValue('1')) == %s))" $amount }}{{ end -}}
{{- $key := printf "k == 'aliyun.com/gpu-count' || (%s) || (k == 'aliyun.com/gpu-mem' && %s)" (include "cardwise.cel.bareName" .root) $spelled -}}
{{- if eq .root.Values.webhook.nvidiaGpu "take" }}{{ $key = printf "%s || k == 'nvidia.com/gpu'" $key }}{{ end -}}
(object.spec.containers != oldObject.spec.containers || object.spec.?initContainers != oldObject.spec.?initContainers) &&
{{ include "cardwise.cel.amountsAre" (dict "spec" "object.spec" "holds" (include "cardwise.cel.haveRewritten" .root)) }} &&
{{ include "cardwise.cel.containersHave" (dict "spec" "object.spec" "key" $key) }}
{{- with .root.Values.webhook.toleratedTaints }} ||
object.spec.?tolerations != oldObject.spec.?tolerations &&
{{ include "cardwise.cel.amountsAre" (dict "spec" "oldObject.spec" "holds" "amounts.contains('\"cardwise.dev/share\":')") }} &&
{{ include "cardwise.cel.list" . }}.exists(taint,
  oldObject.spec.?tolerations.orValue([]).exists(t, taint == {{ include "cardwise.cel.tolerated" . }}) &&
  !object.spec.?tolerations.orValue([]).exists(t, taint == {{ include "cardwise.cel.tolerated" . }}))
{{- end }}
{{- end }}

{{/* The taint that the toleration `t` is of, as webhook.toleratedTaints spells it. */}}
{{- define "cardwise.cel.tolerated" -}}
t.?key.orValue('') + (t.?operator.orValue('') == 'Exists' ? '' : '=' + t.?value.orValue('')) + ':' + t.?effect.orValue('')
{{- end }}

{{/*
Whether the webhook has to see the workload whose pod template's spec is at `path`. nvidia.com/gpu only where it is new:
Kubernetes takes it as it is and each pod is rewritten anyway, so no update of anything else may change a template (that
of a Job never can be; that of a Deployment would roll out).
*/}}
{{- define "cardwise.cel.templateIsOurs" -}}
{{ include "cardwise.cel.annotated" "cardwise.dev/rewritten" }} ||
{{ include "cardwise.cel.templateIsUnwritten" . }}
{{- end }}

{{/* Whether the template has a name that is still to be rewritten. */}}
{{- define "cardwise.cel.templateIsUnwritten" -}}
{{- $bare := dict "spec" "s" "holds" (include "cardwise.cel.haveBare" .root) -}}
{{- $nvidia := dict "spec" "s" "holds" "amounts.contains('\"nvidia.com/gpu\":')" -}}
[object{{ .path }}.orValue({})].exists(s, {{ include "cardwise.cel.amountsAre" $bare }})
{{- if eq .root.Values.webhook.nvidiaGpu "take" }} ||
([object{{ .path }}.orValue({})].exists(s, {{ include "cardwise.cel.amountsAre" $nvidia }}) &&
 !(oldObject != null && [oldObject{{ .path }}.orValue({})].exists(s, {{ include "cardwise.cel.amountsAre" $nvidia }})))
{{- end }}
{{- end }}

{{/* Whether the `object` has the annotation. */}}
{{- define "cardwise.cel.annotated" -}}
(has(object.metadata.annotations) && '{{ . }}' in object.metadata.annotations)
{{- end }}

{{/*
Static pods are the node's: their mirrors must pass as they are. By the word of a kubelet only, else any user could pass
everything by writing the annotation.
*/}}
{{- define "cardwise.cel.notMirror" -}}
!(has(object.metadata.annotations) && 'kubernetes.io/config.mirror' in object.metadata.annotations && request.userInfo.username.startsWith('system:node:'))
{{- end }}

{{/*
The keys of the map as text, one in each line: none has a line break, as Kubernetes allows names only. What the API server
takes for a loop of CEL grows with the square of its steps where a step leaves out something that it could evaluate (&&, ||,
?:, so filter and exists as well; 5,000 steps take a second and more), for a map() without these and for a text it does not.
So what a tenant may write thousands of is searched as text, and only the few that are found are looped over.
*/}}
{{- define "cardwise.cel.keys" -}}
{{ . }}.map(k, k).join('\n')
{{- end }}

{{/* A regular expression for the beginnings of annotations that Cardwise may read: see cardwise.cel.placementKey. */}}
{{- define "cardwise.cel.placementPrefix" -}}
cardwise[.]dev/|ALIYUN_COM_GPU_MEM_|scheduler[.]framework[.]gpushare[.]allocation
{{- end }}

{{/* Whether the value of a CDI annotation names a card, or a device without its vendor and class. */}}
{{- define "cardwise.cel.opensCards" -}}
{{ . }}.contains('nvidia.com/') || {{ . }}.contains('cardwise.dev/') || !{{ . }}.matches('^[A-Za-z0-9._-]+/[A-Za-z0-9._-]+=[^,/=]+(,[A-Za-z0-9._-]+/[A-Za-z0-9._-]+=[^,/=]+)*$')
{{- end }}

{{/* Whether the annotation `k` may be written by Cardwise only. As cardwise/core/api/names.py is_placement_annotation. */}}
{{- define "cardwise.cel.placementKey" -}}
k.startsWith('ALIYUN_COM_GPU_MEM_') || k.startsWith('scheduler.framework.gpushare.allocation') || (k.startsWith('cardwise.dev/') && !(k in ['cardwise.dev/policy', 'cardwise.dev/one-best-node', 'cardwise.dev/defaults', 'cardwise.dev/class', 'cardwise.dev/queue-priority', 'cardwise.dev/mps', 'cardwise.dev/sm-percent', 'cardwise.dev/share-agent', 'cardwise.dev/frameworks', 'cardwise.dev/no-defrag']))
{{- end }}

{{/* Whether the pod `object` is no infrastructure (DCGM, the GPU operator), which manages cards itself. */}}
{{- define "cardwise.cel.notInfrastructure" -}}
!(request.namespace in {{ include "cardwise.cel.list" (include "cardwise.withOwn" (dict "root" . "list" .Values.policies.infrastructure.namespaces) | fromJsonArray) }}) &&
!((request.namespace + '/' + (has(object.spec.serviceAccountName) ? object.spec.serviceAccountName : 'default')) in {{ include "cardwise.cel.list" .Values.policies.infrastructure.serviceAccounts }})
{{- end }}

{{/* Whether one of the `words` is anywhere in the `value`, a list or map, also where it means nothing: see
cardwise.cel.keys. It costs less than these. */}}
{{- define "cardwise.cel.says" -}}
['%s'.format([{{ .value }}])].exists(text, {{ range $i, $word := .words }}{{ if $i }} || {{ end }}text.contains('{{ $word }}'){{ end }})
{{- end }}

{{/* Whether the env `.`, of one container or of several, has, anywhere, a name of cardwise.cel.environment. Ten characters
of each suffice, and the cost limit counts each ten. */}}
{{- define "cardwise.cel.namesOurs" -}}
{{ include "cardwise.cel.says" (dict "value" . "words" (list "CUDA_MPS_" "NVIDIA_GPU" "NVIDIA_VIS")) }}
{{- end }}

{{/* Whether the container `c`, which has env, sets what opens cards or lifts limits. The webhook's own entries are a fieldRef and two
limits in a form that MPS reads as it is written, on containers that hold a share slot; ephemeral containers hold none.
That the limits are those of the request is the webhook's to see. Limits of the driver only the node sets, by CDI. */}}
{{- define "cardwise.cel.environment" -}}
c.env.exists(e, e.name.startsWith('NVIDIA_GPU_MEMORY_') || (e.name.startsWith('CUDA_MPS_') && !(
  has(c.resources) && has(c.resources.limits) && 'cardwise.dev/share' in c.resources.limits && has(e.value) &&
    ((e.name == 'CUDA_MPS_PINNED_DEVICE_MEM_LIMIT' && e.value.matches('^0=[1-9][0-9]*M$')) ||
     (e.name == 'CUDA_MPS_ACTIVE_THREAD_PERCENTAGE' && e.value.matches('^([1-9][0-9]?|100)$'))))) || (e.name == 'NVIDIA_VISIBLE_DEVICES' && !(
  has(e.valueFrom)
    ? (has(e.valueFrom.fieldRef) && e.valueFrom.fieldRef.fieldPath.startsWith("metadata.annotations['cardwise.dev/devices.") &&
       has(c.resources) && has(c.resources.limits) && 'cardwise.dev/share' in c.resources.limits)
    : (!has(e.value) || e.value in ['', 'void', 'none']))))
{{- end }}

{{/* Whether the `amounts` have cards of NVIDIA's own device plugin. */}}
{{- define "cardwise.cel.haveNvidiaCards" -}}
{{- range $i, $name := .Values.policies.nvidiaResources }}{{ if $i }} || {{ end }}
{{- $key := replace "." "[.]" (trimSuffix "*" $name) -}}
amounts.matches('"{{ $key }}{{ if hasSuffix "*" $name }}[^"]*{{ end }}":"[1-9]')
{{- else }}false{{ end -}}
{{- end }}

{{/* Whether the container `c` asks for cards of NVIDIA's own device plugin. dyn: the type checker of policies knows no
limits. */}}
{{- define "cardwise.cel.nvidiaCards" -}}
['%s'.format([dyn(c).?resources.?limits.orValue({})])].exists(amounts, {{ include "cardwise.cel.haveNvidiaCards" . }})
{{- end }}

{{/* Whether NVIDIA's runtime gives the container `c` nothing but its share, whatever envFrom and the image say. The last of
several entries of one name counts, so all must be so. What a reference may name: cardwise.cel.environment. */}}
{{- define "cardwise.cel.closed" -}}
has(c.env) && c.env.exists(e, e.name == 'NVIDIA_VISIBLE_DEVICES') && c.env.all(e, e.name != 'NVIDIA_VISIBLE_DEVICES' || (has(e.value) && e.value == 'void') || (has(e.valueFrom) && has(c.resources) && has(c.resources.limits) && 'cardwise.dev/share' in c.resources.limits))
{{- end }}

{{/* The path without empty and "." parts, and without what would end its line or column: see policies/hostpaths.yaml. */}}
{{- define "cardwise.cel.barePath" -}}
'/' + {{ . }}.findAll('[^/.\n\t][^/\n\t]*|[.][^/\n\t]+').join('/')
{{- end }}

{{/* For each of the `paths` the first line of variables.hosts that begins with it, and with `end` after it. */}}
{{- define "cardwise.cel.mounting" -}}
{{ include "cardwise.cel.list" .paths }}.map(p, '\n' + p + '{{ .end }}').filter(p, variables.hosts.contains(p)).map(p, p + variables.hosts.split(p, 2)[1].split('\n', 2)[0])
{{- end }}

{{/*
Variables of the policies that hold a part of ours to its work: `what` it writes, such as pods/status, and which fields an
update changes: keys of annotations, labels and a node's capacities one by one, else what lies in metadata, spec and
status; `strange` are those that the account may not, lists by where they lie. `may`: regular expressions by `what`.
dyn: by what is there, so that a field of a newer Kubernetes counts too.
*/}}
{{- define "cardwise.policy.changes" -}}
{{- $one := "{'at': dyn('%s'), 'end': dyn('%s'), 'now': variables.now%s, 'before': variables.before%s}" -}}
- name: what
  expression: "request.resource.resource + (request.?subResource.orValue('') == '' ? '' : '/' + request.subResource)"
- name: now
  expression: "object == null || oldObject == null ? dyn({}) : dyn(object)"
- name: before
  expression: "object == null || oldObject == null ? dyn({}) : dyn(oldObject)"
- name: places
  expression: >-
    [{{ printf $one "" "" "" "" }}
    {{- range list "metadata" "spec" "status" }}
    {{- $inner := printf ".?%s.orValue({})" . }},
    {{ printf $one (print . ".") "" $inner $inner }}
    {{- end }}
    {{- range list "metadata.annotations" "metadata.labels" "status.capacity" "status.allocatable" }}
    {{- $inner := printf ".?%s.orValue({})" (replace "." ".?" .) }},
    {{ printf $one (print . "[") "]" $inner $inner }}
    {{- end }}]
- name: changed
  expression: >-
    variables.places.map(p, (p.now.filter(k, !(k in p.before) || p.now[k] != p.before[k]) + p.before.filter(k, !(k in p.now))).map(k, string(p.at) + k + string(p.end)))
- name: strange
  expression: >-
    variables.changed.map(fields, fields.filter(field, !(field in [
    'metadata', 'spec', 'status', 'metadata.annotations', 'metadata.labels', 'status.capacity', 'status.allocatable',
    'metadata.managedFields', 'metadata.resourceVersion', 'metadata.generation']) && !field.matches({
    {{- range $i, $what := keys .may | sortAlpha }}{{ if $i }}, {{ end }}'{{ $what }}': r'^({{ get $.may $what }})$'{{ end -}}
    }[?variables.what].orValue('^$')))).filter(fields, fields.size() > 0)
{{- end }}

{{- define "cardwise.policy.noStrangeFields" -}}
- expression: variables.strange.size() == 0
  messageExpression: "'the {{ . }} may not change ' + variables.strange[0][0] + ' of ' + variables.what"
  message: the {{ . }} may not change this field
  reason: Forbidden
{{- end }}

{{/* Into a Secret of another type Kubernetes writes by itself: the token of any account of the namespace. */}}
{{- define "cardwise.policy.opaqueSecret" -}}
- expression: variables.what != 'secrets' || dyn(object).type == 'Opaque'
  message: the {{ . }} may create a Secret of type Opaque only
  reason: Forbidden
{{- end }}

// The search runs in a worker, and a page that was opened from disk may have none: there, a hidden frame stands for it.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.onload = () => this.begin(url)
      document.body.append(this.frame)
    }

    begin(url) {
      this.frame.onload = null
      const inside = this.frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inside.document.createElement("script")
      script.src = url
      script.onload = () => {
        this.inside = inside
        this.waiting.splice(0).forEach(data => this.postMessage(data))
      }
      inside.document.body.append(script)
    }

    postMessage(data) {
      if (this.inside) this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }))
      else this.waiting.push(data)
    }
  }
}
